"""A whole run from one TOML file: tokenizer → training stages → demonstrations → SFT → RL stages, evaluated → report.

A pipeline is a run directory whose stages are run directories below it. Each step ends in one file (a tokenizer, a
``final.json``, a row file in ``rows/``) that appears atomically; a pipeline that is started again skips what has its
file and continues the first step that has not. Every number of the report is computed from these files.

Held-out tasks are used in two disjoint slices: the report scores tasks [0, tasks), SFT decides when to stop on the
``stop_tasks`` after them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5 import run_report
from glm5.clock import Clock
from glm5.config import apply_overrides, build_config, load_config, read_toml
from glm5.errors import ConfigError, DataError
from glm5.process import lock_directory
from glm5.records import Episode
from glm5.rl.config import RLConfig
from glm5.runlog import RunLog, temporary_path, write_atomic
from glm5.train.config import StageConfig
from glm5.train.preference_config import PreferenceConfig

if TYPE_CHECKING:
    from glm5.data.packing import Batch
    from glm5.model.transformer import GlmMoeDsaForCausalLM
    from glm5.rl.launch.local import RolloutStack

Row = dict[str, Any]
_MTP_PROMPTS, _MTP_PROMPT_TOKENS = 32, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """The tokenizer of the run."""

    vocab_size: int = 1024
    """Vocabulary, special tokens included."""
    sources: tuple[str, ...] = ("stdlib",)
    """Document sources: ``stdlib``, a folder, a ``.jsonl`` or a ``.parquet`` file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """What the report measures on held-out tasks."""

    tasks: int = 240
    """Held-out tasks per taskset for pass@1 after SFT and after every RL stage."""
    wall_s: int = 1200
    """Seconds that the whole run should take at most; 0: no goal."""
    temperature: float = 1.0
    """Sampling temperature of pass@1."""
    stop_tasks: int = 64
    """Further held-out tasks per taskset that decide when SFT stops."""
    drafts: int = 4
    """Tokens drafted per verification for the MTP acceptance length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """``pipeline.toml``: paths of stages are relative to the file, ``run_dir`` to the working directory."""

    name: str
    """Name of the run."""
    run_dir: str
    """Run directory of the pipeline; stages lie below it."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer of the run."""
    stages: tuple[str, ...]
    """Stage files in order, SFT last."""
    rl: tuple[str, ...]
    """RL files in order, for example reasoning, agentic, general, distillation."""
    reward_model: str = ""
    """File of the reward model, trained before the first RL stage that names its run."""
    preference_pairs: int = 240
    """Preference pairs of each taskset that the reward model learns from."""
    demonstrations: dict[str, int]
    """Demonstrations of each taskset that SFT learns from; all tasksets of the RL stages, which are those evaluated."""
    report: ReportConfig = field(default_factory=ReportConfig)
    """What the report measures."""


def run_pipeline(path: Path, overrides: Sequence[str] = ()) -> Path:
    """Run the pipeline of ``path`` to its end, or continue it; give the path of the report."""
    return Pipeline(path, overrides).run()


class Pipeline:
    """One run; every method is a step that does nothing when its result exists."""

    def __init__(self, path: Path, overrides: Sequence[str]) -> None:
        data = apply_overrides(read_toml(path), overrides)
        self.config = build_config(PipelineConfig, data, str(path))
        self.run_dir = Path(self.config.run_dir)
        self.stages = [load_config(StageConfig, path.parent / name) for name in self.config.stages]
        self.rl = [load_config(RLConfig, path.parent / name) for name in self.config.rl]
        practised = {taskset for stage in self.rl for taskset in stage.tasksets}
        if set(self.config.demonstrations) != practised:
            raise ConfigError(f"{path}: demonstrations name {sorted(self.config.demonstrations)}, the RL stages "
                              f"practise {sorted(practised)}; name the same ones")
        if not self.stages or self.stages[-1].stage != "sft":
            raise ConfigError(f"{path}: stages must end with an sft stage")
        self.reward = load_config(PreferenceConfig, path.parent / self.config.reward_model) \
            if self.config.reward_model else None
        wanted = {stage.reward_model for stage in self.rl if stage.reward_model.startswith("stage:")}
        given = {f"stage:{self.reward.name}"} if self.reward is not None else set()
        if wanted != given:
            raise ConfigError(f"{path}: the RL stages name the reward models {sorted(wanted)}, reward_model trains "
                              f"{sorted(given)}; give the file of the one that is named")
        names = [stage.name for stage in (*self.stages, *self.rl)]
        if not self.rl or len(set(names)) < len(names):
            raise ConfigError(f"{path}: stages {names}: give at least one RL stage, and each a name of its own")
        self._limits = self.rl[-1].for_evaluation(self.config.demonstrations)
        self._settings = {"pipeline": dataclasses.asdict(self.config),
                          "rl": {stage.name: dataclasses.asdict(stage) for stage in self.rl},
                          "reward": dataclasses.asdict(self.reward) if self.reward is not None else {},
                          "stages": {stage.name: dataclasses.asdict(stage) for stage in self.stages}}

    def run(self) -> Path:
        """All steps in order. Raises ConfigError when the run directory holds a run of other settings."""
        self._check_machine()
        self._check_settings()
        with lock_directory(self.run_dir):
            return self._run()

    def _run(self) -> Path:
        self._log = RunLog(self.run_dir)
        self._log.write_config(self._settings)
        self._log.event("pipeline_started")
        self._clock = Clock(self.run_dir / "clock.json")
        with self._clock.step("run"):
            self._train_tokenizer()
            for stage in self.stages[:-1]:
                self._run_stage(stage)
            self._rows("mtp", self._measure_mtp)
            self._write_demonstrations()
            self._train_sft()
            sft = self.stages[-1].name
            self._rows("pass_at_1.sft",
                       lambda: self._measure_skill("sft", self._final(sft), run_report.agentic(self.rl)))
            for stage in self.rl:
                self._train_reward_model(stage)
                final = self._train_rl(stage)
                self._rows(f"pass_at_1.{stage.name}",
                           lambda stage=stage, final=final: self._measure_skill(stage.name, final, stage))
            self._publish_final(final)
        report = self._write_report()
        self._log.event("pipeline_finished")
        return report

    # -- steps -----------------------------------------------------------------------------------------------------

    def _check_machine(self) -> None:
        """Fail in the first second, not after the training, when isolation, the plotting library or the library of a
        taskset is missing."""
        from glm5.env.service import load_taskset, require_sandbox
        from glm5.eval.figures import require_matplotlib

        require_matplotlib()
        for sandbox in {stage.sandbox for stage in self.rl}:
            require_sandbox(sandbox)
        for taskset in self.config.demonstrations:
            load_taskset(taskset).task("demo", 0)

    def _check_settings(self) -> None:
        """Results of other settings must not end up in this report."""
        try:
            before = json.loads((self.run_dir / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        now = json.loads(json.dumps(self._settings, default=str))
        changed = [f"{part}.{key}" for part in now for key in now[part]
                   if before.get(part, {}).get(key) != now[part][key]]
        if changed:
            raise ConfigError(f"{self.run_dir}: was started with other settings ({changed[0]}); use another run_dir, "
                              "or remove this one to start again")

    def _train_tokenizer(self) -> None:
        from glm5.data.sources import read_documents
        from glm5.tokenizer.bpe import train_tokenizer

        directory = self.run_dir / "tokenizer"
        if directory.exists():
            return
        with self._clock.step("tokenizer"):
            documents = read_documents(self.config.tokenizer.sources)
            trained = train_tokenizer((document.text for document in documents), self.config.tokenizer.vocab_size)
            temporary = temporary_path(directory)
            try:
                trained.save(temporary)
                temporary.rename(directory)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def _run_stage(self, stage: StageConfig,
                   evaluate: Callable[[GlmMoeDsaForCausalLM, int], dict[str, float]] | None = None) -> Path:
        from glm5.train.stages import run_stage

        tokenizer = str(self.run_dir / "tokenizer") if stage.init == "random" else stage.tokenizer
        placed = dataclasses.replace(stage, tokenizer=tokenizer)
        with self._clock.step(stage.name):
            return run_stage(placed, self.run_dir / stage.name, evaluate)

    def _final(self, name: str) -> Path:
        from glm5.train.checkpoint import final_checkpoint

        checkpoint = final_checkpoint(self.run_dir / name)
        if checkpoint is None:
            raise ConfigError(f"{self.run_dir / name}: no finished run; remove {self.run_dir} and run again")
        return checkpoint

    def _write_demonstrations(self) -> None:
        """One conversations file for all tasksets, where the SFT stage expects it."""
        from glm5.env.check import write_demonstrations

        target = self._demonstrations()
        if target.exists():
            return
        with self._clock.step("demonstrations"):
            text = ""
            for name, count in self.config.demonstrations.items():
                part = self.run_dir / f"demonstrations.{name}.jsonl"
                write_demonstrations(name, count, part, self._limits.sandbox)
                text += part.read_text(encoding="utf-8")
                part.unlink()
            write_atomic(target, text)

    def _demonstrations(self) -> Path:
        return self.run_dir / "demonstrations.jsonl"

    def _train_sft(self) -> None:
        """SFT with held-out pass@1 on real episodes as the stopping rule."""
        from glm5.eval.suites.tasksets import pass_at_1_rows
        from glm5.model.checkpoint import save_model
        from glm5.train.checkpoint import final_checkpoint

        stage = dataclasses.replace(self.stages[-1], data=dataclasses.replace(
            self.stages[-1].data, conversations=(str(self._demonstrations()),)))
        scratch = self.run_dir / stage.name / "evaluated"
        shutil.rmtree(scratch, ignore_errors=True)  # of an attempt that was killed
        if final_checkpoint(self.run_dir / stage.name) is not None:
            return
        start = self._final(self.stages[-2].name) if len(self.stages) > 1 else self.run_dir / "tokenizer"
        with self._stack(start, stage.name) as stack:

            def evaluate(model: GlmMoeDsaForCausalLM, step: int) -> dict[str, float]:
                save_model(model, scratch / f"{step:06d}", self.run_dir / "tokenizer")
                stack.update_weights(scratch / f"{step:06d}", step)
                for older in scratch.iterdir():  # a restarted engine loads the newest
                    if older.name != f"{step:06d}":
                        shutil.rmtree(older)
                rows = pass_at_1_rows("sft", self._evaluate(
                    stack, f"sft-{step}", self.config.report.tasks, self.config.report.stop_tasks))
                return {row["name"].replace(".sft.", "."): row["value"] for row in rows}

            self._run_stage(stage, evaluate)
        shutil.rmtree(scratch, ignore_errors=True)

    def _train_reward_model(self, stage: RLConfig) -> None:
        """The reward model that ``stage`` names, if it is one of this run, and its accuracy on held-out pairs."""
        from glm5.eval.suites.preferences import accuracy_row
        from glm5.rl.general import train_reward_model
        from glm5.train.preferences import held_out_result

        reward = self.reward
        if reward is None or stage.reward_model != f"stage:{reward.name}":
            return
        with self._clock.step(reward.name):
            train_reward_model(reward, stage, self.run_dir, self.config.preference_pairs)
        self._rows(f"accuracy.{reward.name}",
                   lambda: [accuracy_row(reward.name, *held_out_result(self.run_dir / reward.name))])

    def _train_rl(self, stage: RLConfig) -> Path:
        from glm5.rl.trainer import run_rl

        with self._clock.step(stage.name):
            return run_rl(stage, self.run_dir / stage.name)

    def _publish_final(self, checkpoint: Path) -> None:
        """``final/``: the trained model as a directory that Transformers loads, with the facts of its checkpoint."""
        from glm5.model.checkpoint import load_model, replacing, save_model

        target = self.run_dir / "final"
        if not target.exists():
            with replacing(target) as temporary:
                save_model(load_model(checkpoint), temporary, self.run_dir / "tokenizer")
                shutil.copyfile(checkpoint / "meta.json", temporary / "meta.json")

    # -- measurements ----------------------------------------------------------------------------------------------

    def _rows(self, name: str, measure: Callable[[], list[Row]]) -> list[Row]:
        """Rows of a measurement, taken once and kept in ``rows/NAME.json``."""
        path = self.run_dir / "rows" / f"{name}.json"
        if path.exists():
            return list(json.loads(path.read_text()))
        path.parent.mkdir(exist_ok=True)
        with self._clock.step(f"evaluation.{name}"):
            rows = measure()
        write_atomic(path, json.dumps(rows, indent=1))
        return rows

    def _stack(self, checkpoint: Path, name: str) -> RolloutStack:
        from glm5.rl.launch.local import RolloutStack

        return RolloutStack(self._limits, checkpoint, self.run_dir / "evaluation" / name)

    def _evaluate(self, stack: RolloutStack, label: str, offset: int, count: int) -> list[Episode]:
        return stack.evaluate(count=count, offset=offset, temperature=self.config.report.temperature, label=label)

    def _measure_skill(self, label: str, checkpoint: Path, stage: RLConfig) -> list[Row]:
        """Held-out pass@1 of every taskset, and the mean of those of ``stage``."""
        from glm5.eval.suites.tasksets import pass_at_1_rows

        with self._stack(checkpoint, label) as stack:
            episodes = self._evaluate(stack, label, 0, self.config.report.tasks)
        return pass_at_1_rows(label, episodes, mean_of=stage.tasksets)

    def _measure_mtp(self) -> list[Row]:
        """Acceptance length on the model's own greedy continuation of held-out text."""
        from glm5.engine.speculative import mtp_acceptance
        from glm5.model.checkpoint import load_model
        from glm5.tokenizer.bpe import load_tokenizer
        from glm5.train.stages import held_out_batches

        stage = self.stages[-2]
        model = load_model(self._final(stage.name))
        tokenizer = load_tokenizer(self.run_dir / "tokenizer")
        batches = held_out_batches(stage.data, stage.length, tokenizer, self.run_dir / "token-cache")
        prompts = _document_starts(batches, tokenizer.pad_id)[:_MTP_PROMPTS]
        if not prompts:
            raise DataError(f"stage {stage.name}: no document of {_MTP_PROMPT_TOKENS} tokens in the held-out rows; "
                            "raise data.held_out_rows")
        drafts = self.config.report.drafts
        length = mtp_acceptance(model, prompts, drafts=drafts)
        return [{"name": "mtp.acceptance_length", "value": length, "unit": f"tokens per {drafts} drafts",
                 "n": len(prompts)}]

    def _write_report(self) -> Path:
        self._rows("mtp", self._measure_mtp)
        return run_report.write(self.run_dir, self.config.name, self.stages, self.rl, self._clock,
                                self.config.report.wall_s)


def _document_starts(batches: Sequence[Batch], end_id: int) -> list[list[int]]:
    """The first ``_MTP_PROMPT_TOKENS`` ids of every document, or part of one, in packed rows that has so many.

    No prompt runs from one document into the next, nor ends where its document does.
    """
    prompts = []
    for batch in batches:
        for ids_T, documents_T in zip(batch.ids_BT, batch.documents_BT, strict=True):
            for document in range(int(documents_T.max()) + 1):
                ids = [index for index in ids_T[documents_T == document].tolist() if index != end_id]
                if len(ids) >= _MTP_PROMPT_TOKENS:
                    prompts.append(ids[:_MTP_PROMPT_TOKENS])
    return prompts
