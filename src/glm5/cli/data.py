"""Commands over text: tokenizers, corpora, batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.cli.options import AsJson, Overrides, default_run_dir, print_results

Settings = Annotated[list[str] | None, typer.Option("--set", help="Key of a corpus, such as filters.min_chars=200.")]
Sources = Annotated[list[str], typer.Argument(help='"stdlib", folders, files, git:PATH.')]
TokenizerDir = Annotated[Path | None, typer.Option(help="Tokenizer directory; the stage's own when left out.")]
StageRunDir = Annotated[Path | None, typer.Option(help="Run directory of the stage.")]


def tokenizer_train(sources: Annotated[list[str], typer.Argument(help='"stdlib", folders, .jsonl or .parquet files.')],
                    output: Annotated[Path, typer.Option(help="Directory to write.")],
                    vocab_size: Annotated[int, typer.Option(help="Size, special tokens included.")] = 1024) -> None:
    """Train a byte-level BPE tokenizer with the GLM special tokens."""
    from glm5.data.sources import read_documents
    from glm5.tokenizer.bpe import train_tokenizer

    trained = train_tokenizer((document.text for document in read_documents(sources)), vocab_size)
    trained.save(output)
    print(output)


def data_prepare(config: Path, overrides: Overrides = None, run_dir: StageRunDir = None, tokenizer: TokenizerDir = None,
                 as_json: AsJson = False) -> None:
    """Filter and tokenise the documents of a stage now, with its data.workers, so that it starts at once."""
    from glm5.train.stages import prepare_stage

    rows = prepare_stage(*stage_tokenizer(config, overrides, run_dir, tokenizer))
    print_results(f"data prepare {config}", rows, as_json)


def data_inspect(config: Path, overrides: Overrides = None, run_dir: StageRunDir = None, tokenizer: TokenizerDir = None,
                 batches: Annotated[int, typer.Option(help="Batches to show.")] = 1,
                 start_step: Annotated[int, typer.Option(help="Step of the first one.")] = 0,
                 as_json: AsJson = False) -> None:
    """Show batches of a stage: decoded text by document; what the loss does not train stands in ⟦ ⟧."""
    from glm5.train.stages import inspect_stage

    stage = stage_tokenizer(config, overrides, run_dir, tokenizer)
    rows, shown = inspect_stage(*stage, range(start_step, start_step + batches), sys.stderr if as_json else sys.stdout)
    print_results(f"data inspect {config}", rows, as_json, batches=shown)


def data_filter(sources: Sources, output: Annotated[Path, typer.Option(help=".jsonl file to write.")],
                settings: Settings = None, as_json: AsJson = False) -> None:
    """Write the documents that pass the filters of a corpus; count the dropped ones by reason."""
    from glm5.data.prepare import corpus_from_settings, write_kept
    from glm5.train.scoring import load_scorer

    rows = write_kept(corpus_from_settings(sources, settings or []), output, load_scorer)
    print_results("data filter", rows, as_json)


def data_dedup(sources: Sources, output: Annotated[Path, typer.Option(help=".jsonl file to write.")],
               threshold: Annotated[float, typer.Option(help="Jaccard similarity of near-duplicates.")] = 0.8,
               keep: Annotated[str, typer.Option(help="first or longest.")] = "first",
               exact_only: Annotated[bool, typer.Option(help="Leave near-duplicates.")] = False,
               settings: Settings = None, as_json: AsJson = False) -> None:
    """Write the documents without exact and near duplicates; count the dropped ones."""
    from glm5.data.prepare import corpus_from_settings, write_kept

    dedup = {"exact": True, "near": not exact_only, "threshold": threshold, "keep": keep}
    rows = write_kept(corpus_from_settings(sources, settings or [], dedup), output)
    print_results("data dedup", rows, as_json)


def data_train_filter(output: Path, label: Annotated[list[str], typer.Option(
        help="LABEL=SOURCE, twice or more; the first label is the one whose probability is the quality.")],
        as_json: AsJson = False) -> None:
    """Train an n-gram classifier for the quality or language filter from examples of each label."""
    from glm5.data.classifier import train_from_sources

    print_results(f"data train-filter {output}", train_from_sources(label, output), as_json)


def stage_tokenizer(config: Path, overrides: list[str] | None, run_dir: Path | None,
                     tokenizer: Path | None) -> tuple[Any, Any, Path]:
    """A stage's configuration, the tokenizer that it trains with, and its run directory."""
    from glm5.config import load_config
    from glm5.tokenizer.bpe import load_tokenizer
    from glm5.train.config import StageConfig
    from glm5.train.stages import resolve_init

    stage = load_config(StageConfig, config, overrides or [])
    directory = run_dir or default_run_dir(config, stage.name)
    return stage, load_tokenizer(tokenizer or resolve_init(stage.init, directory) or stage.tokenizer), directory
