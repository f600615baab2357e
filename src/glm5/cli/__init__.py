"""The ``glm5`` command: parse → load → one library call → print. Results go to stdout, progress to stderr.

Exit codes: 0 done, 1 a check or comparison failed, 2 the user can fix it (one line says how), 130 interrupted.
"""

from __future__ import annotations

import errno
import sys

import typer

from glm5.cli import continual, data, environments, ledger, models, rewards, runs, serving
from glm5.errors import Glm5Error

app = typer.Typer(name="glm5", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="The complete GLM-5 system: train, reinforce and serve.")
for command in (runs.run, runs.train, runs.rl, runs.orchestrator, runs.results,
                serving.serve, serving.adapter, serving.gateway, serving.generate, serving.chat,
                models.convert, models.quantize, models.deploy,
                ledger.timeline, ledger.transcripts, ledger.exporter):
    app.command()(command)
app.command("import")(models.import_checkpoint)

_GROUPS = {
    "model": ("Model configurations and checkpoints.", {"info": models.model_info}),
    "tokenizer": ("Byte-level BPE tokenizers.", {"train": data.tokenizer_train}),
    "data": ("Corpora: prepare, filter, look at batches.", {
        "prepare": data.data_prepare, "inspect": data.data_inspect, "filter": data.data_filter,
        "dedup": data.data_dedup, "train-filter": data.data_train_filter}),
    "env": ("Tasksets and task services.", {
        "serve": environments.env_serve, "list": environments.env_list, "check": environments.env_check,
        "demos": environments.env_demos}),
    "reward": ("Preference pairs and reward models.", {
        "pairs": rewards.reward_pairs, "train": rewards.reward_train, "serve": rewards.reward_serve}),
    "continual": ("Learning from deployed sessions.", {
        "run": continual.continual_run, "filter": continual.continual_filter}),
    "ledger": ("Episodes that an RL run recorded.", {
        "show": ledger.ledger_show, "list": ledger.ledger_list, "export": ledger.ledger_export,
        "replay": ledger.ledger_replay}),
    "bench": ("Measurements against other implementations.", {
        "attention": models.bench_attention, "train": runs.bench_train, "engine": serving.bench_engine}),
}
for name, (description, commands) in _GROUPS.items():
    group = typer.Typer(no_args_is_help=True, help=description)
    for word, command in commands.items():
        group.command(word)(command)
    app.add_typer(group, name=name)


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space or choose another run directory"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it accessible or choose another place"),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "correct the path"),
}
"""What a user can do about an error of the operating system, by its number; others are defects and show where."""


def main() -> None:
    """Entry point: errors that a user can fix are one line and exit code 2."""
    from glm5.process import die_with_parent

    die_with_parent()
    try:
        app()
    except Glm5Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as error:
        if error.code == 130:  # typer's answer to Ctrl-C
            print("interrupted; run the same command again to continue", file=sys.stderr)
        raise
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; {_REMEDIES[error.errno]}, then run again", file=sys.stderr)
        sys.exit(2)
