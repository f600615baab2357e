"""Configuration of the training stages: what one TOML file of ``configs/<size>/<stage>.toml`` may say. No torch here.

A stage is a run: it starts from random weights, from a checkpoint directory, or from the final checkpoint of another
stage beside it (``init = "stage:NAME"``). What a stage trains and with which attention follows from ``stage`` alone
(``RECIPES``); everything else is a number with its published default where the report gives one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from glm5.config import require_at_least
from glm5.data.config import DEFAULT_RECALL, SHARD_CHARS, CorpusConfig, DedupConfig, RecallKind
from glm5.device import AUTO
from glm5.errors import ConfigError
from glm5.model.quantize.plan import QuantisationPlan

StageName = Literal["pretrain", "midtrain", "dsa-warmup", "dsa-sparse", "sft"]
Attention = Literal["dense", "sparse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a stage trains, which follows from its name."""

    attention: Attention
    """Attention of the forward pass: all keys, or those that the indexer selects."""
    trains_main: bool
    """Whether everything but the indexers learns, from the language-model and multi-token losses."""
    trains_indexer: bool
    """Whether the indexers learn, from their KL loss."""
    conversations: bool
    """Whether the data are rendered conversations rather than documents."""


RECIPES: Mapping[StageName, Recipe] = {
    "pretrain": Recipe(attention="dense", trains_main=True, trains_indexer=False, conversations=False),
    "midtrain": Recipe(attention="dense", trains_main=True, trains_indexer=False, conversations=False),
    "dsa-warmup": Recipe(attention="dense", trains_main=False, trains_indexer=True, conversations=False),
    "dsa-sparse": Recipe(attention="sparse", trains_main=True, trains_indexer=True, conversations=False),
    "sft": Recipe(attention="sparse", trains_main=True, trains_indexer=True, conversations=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Muon for matrices, AdamW for the rest; ``glm5.train.optimizers`` says which parameter goes where."""

    lr: float = 2e-4
    """Peak learning rate of AdamW (embeddings, head, router, norms)."""
    muon_lr: float | None = None
    """Peak learning rate of Muon; None takes ``lr``, which the RMS matching of the update permits."""
    indexer_lr: float | None = None
    """Peak learning rate of the indexers (AdamW); None takes ``lr``."""
    kind: Literal["muon", "adamw"] = "muon"
    """``adamw`` trains the matrices by AdamW too, at ``lr``."""
    muon_split: bool = True
    """Orthogonalise W_UQ, W_UK and W_UV head by head; False takes each projection as one matrix."""
    momentum: float = 0.95
    """Momentum of Muon, Nesterov form."""
    newton_schulz_steps: int = 5
    """Newton-Schulz iterations of Muon."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments of AdamW."""
    eps: float = 1e-8
    """Added to the root of the second moment of AdamW."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings; vectors and indexers have none."""
    clip_norm: float = 1.0
    """Largest gradient norm, of the main parameters and of the indexers separately; 0 does not clip."""

    def __post_init__(self) -> None:
        for name, rate in (("lr", self.lr), ("muon_lr", self.muon_lr), ("indexer_lr", self.indexer_lr)):
            if rate is not None and rate <= 0:
                raise ConfigError(f"{name}={rate} is not positive; give a learning rate above 0")
        if not 0 <= self.momentum < 1 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"momentum={self.momentum}, betas={self.betas}: each must lie in [0, 1)")
        require_at_least(1, newton_schulz_steps=self.newton_schulz_steps)
        require_at_least(0, weight_decay=self.weight_decay, clip_norm=self.clip_norm, eps=self.eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over the steps, as a factor of the peak rates."""

    kind: Literal["cosine", "linear", "constant", "stable"] = "cosine"
    """Decay after the warm-up: cosine, straight line, none, or none until the last ``decay_fraction`` of the steps."""
    warmup_steps: int = 0
    """Steps of the linear rise from 0."""
    final: float = 0.2
    """Factor at the last step (unused by ``constant``); 4e-5 of 2e-4 in pre-training is 0.2."""
    decay_fraction: float = 0.2
    """Share of the steps over which ``stable`` falls to ``final``."""

    def __post_init__(self) -> None:
        require_at_least(0, warmup_steps=self.warmup_steps)
        if not 0 <= self.final <= 1 or not 0 < self.decay_fraction <= 1:
            raise ConfigError(f"final={self.final} must lie in [0, 1], decay_fraction={self.decay_fraction} in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRampConfig:
    """Fewer micro-batches per step at first (GLM-4.5: 16M to 64M tokens over the first 500B, then constant)."""

    first_rows: int = 0
    """Rows of the first step; 0 starts with ``batch_rows`` at once."""
    steps: int = 0
    """Steps over which the rows rise to ``batch_rows``, in whole units."""
    unit: int = 0
    """Rows are added in multiples of this, which ``fsdp x ep`` of a layout must divide; 0 takes ``micro_rows``."""

    def __post_init__(self) -> None:
        require_at_least(0, first_rows=self.first_rows, steps=self.steps, unit=self.unit)
        if bool(self.first_rows) != bool(self.steps):
            raise ConfigError(f"first_rows={self.first_rows} and steps={self.steps}: give both or neither")


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """Which steps are skipped. One with a loss or gradient that is not finite always is."""

    loss_rise: float = 3.0
    """Skip a step whose loss lies this many nats above the mean of the last ones; 0 never does."""
    norm_factor: float = 0.0
    """Skip a step whose gradient norm is this many times the mean of the last ones; 0 never does."""
    window: int = 32
    """Applied steps that the means are taken over; the rules hold once there are as many."""
    max_skipped: int = 20
    """Stop when this many steps were skipped."""

    def __post_init__(self) -> None:
        require_at_least(0, loss_rise=self.loss_rise, norm_factor=self.norm_factor)
        require_at_least(1, window=self.window, max_skipped=self.max_skipped)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the batches come from."""

    sources: tuple[str, ...] = ("stdlib",)
    """Documents as they are: ``stdlib``, folders, files or ``git:PATH``; short for one corpus with these sources."""
    corpora: tuple[CorpusConfig, ...] = ()
    """Weighted components of the mixture with their filters and packing; takes the place of ``sources``."""
    dedup: DedupConfig = field(default_factory=DedupConfig)
    """Removal of duplicates over all corpora."""
    recall_fraction: float = 0.0
    """Share of the training rows that are synthetic long-range recall (mid-training)."""
    recall_kinds: tuple[RecallKind, ...] = DEFAULT_RECALL
    """Kinds of recall texts; one that is named twice comes twice as often."""
    conversations: tuple[str, ...] = ()
    """``.jsonl`` files of conversations (sft)."""
    declare_tools: bool = False
    """Render the tools of a conversation into its prompt."""
    held_out_fraction: float = 0.03
    """Share of the files kept out of training."""
    held_out_rows: int = 32
    """Rows of held-out text that are scored before and after the stage; 0 scores none."""
    workers: int = 0
    """Processes that tokenise and pack ahead of training; 0 makes the next batch in a thread of the trainer."""
    ahead: int = 2
    """Batches that each worker may be ahead."""
    shard_chars: int = SHARD_CHARS
    """Characters of text that are tokenised at a time; training starts when the first such shard is ready."""

    def __post_init__(self) -> None:
        if not 0 <= self.recall_fraction < 1 or not 0 <= self.held_out_fraction < 1:
            raise ConfigError(f"recall_fraction={self.recall_fraction} and held_out_fraction={self.held_out_fraction} "
                              "must lie in [0, 1)")
        if self.held_out_rows and not self.held_out_fraction:
            raise ConfigError(f"held_out_rows={self.held_out_rows} needs held_out_fraction above 0; or set it to 0")
        if self.recall_fraction and not self.recall_kinds:
            raise ConfigError(f"recall_fraction={self.recall_fraction} needs recall_kinds: name at least one")
        names = [corpus.name for corpus in self.corpora]
        if len(set(names)) < len(names):
            raise ConfigError(f"corpora names {names}: each must be different")
        require_at_least(0, held_out_rows=self.held_out_rows, workers=self.workers)
        require_at_least(1, ahead=self.ahead, shard_chars=self.shard_chars)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """When to call the evaluation hook of a stage and when to stop by it."""

    every: int = 0
    """Steps between calls; 0 never calls the hook."""
    metric: str = "pass_at_1.mean"
    """Key of the hook's answer that decides which checkpoint is the best, larger being better."""
    patience: int = 0
    """Stop after this many calls in a row without a rise; 0 trains all steps."""
    min_rise: float = 0.0
    """A rise counts when it exceeds this much; noise of the measurement should not prolong a stage."""

    def __post_init__(self) -> None:
        require_at_least(0, every=self.every, patience=self.patience, min_rise=self.min_rise)
        if self.patience and not self.every:
            raise ConfigError(f"patience={self.patience} needs every above 0: the hook is never called")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a stage is spread over the ``fsdp x ep x cp x tp`` processes that ``torchrun`` starts; docs/parallelism.md.

    None of it changes what is trained: losses and gradients are those of one process, up to rounding.
    """

    fsdp: int = 0
    """Processes with other rows and the same experts; parameters are sharded over all. 0: those that remain."""
    ep: int = 1
    """Processes that divide the routed experts and exchange tokens; each has other rows."""
    cp: int = 1
    """Processes that divide the tokens of their rows."""
    tp: int = 1
    """Processes that divide the attention heads."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass: less memory, a third more work."""
    timeout_s: float = 600.0
    """Deadline of every exchange between processes; past it the run ends with an error."""

    def __post_init__(self) -> None:
        require_at_least(1, ep=self.ep, cp=self.cp, tp=self.tp, timeout_s=self.timeout_s)
        require_at_least(0, fsdp=self.fsdp)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """One training stage."""

    stage: StageName
    """What is trained and how; see ``RECIPES``."""
    name: str
    """Name of the run, and of the stage for ``init = "stage:NAME"``."""
    init: str = "random"
    """``random``, a checkpoint directory, or ``stage:NAME``: the final checkpoint of run NAME beside this one."""
    preset: str = "nano"
    """Shape of the model when ``init`` is random."""
    tokenizer: str = ""
    """Tokenizer directory when ``init`` is random; otherwise the checkpoint's own is used."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json that this stage changes, for example ``rope_parameters``."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the batches come from."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Rates and constants of the optimizers."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """The evaluation hook."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How many processes share the work, and how."""
    device: str = AUTO
    """Where the model is trained: a name of ``glm5.device``."""
    quantization: QuantisationPlan | None = None
    """Train for this export: losses and gradients are those of the rounded weights; None trains plain weights."""
    steps: int
    """Optimizer steps."""
    max_minutes: float = 0.0
    """Stop after this long even if steps remain; the schedule follows whichever is further. 0: no limit."""
    batch_rows: int = 16
    """Rows of one optimizer step."""
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Rows of the first steps."""
    micro_rows: int = 0
    """Rows of one forward and backward pass of a process; 0 takes all its rows of the step at once."""
    length: int = 256
    """Tokens per row."""
    mtp_steps: int = 3
    """Multi-token prediction steps, all with the parameters of the one MTP layer; 0 leaves the MTP layer untrained."""
    mtp_weight: float = 0.3
    """Weight of the mean multi-token loss."""
    train_indexer: bool = True
    """False freezes the indexers in a stage that could train them (sft)."""
    indexer_weight: float = 1.0
    """Weight of the indexers' KL loss; it reaches nothing but the indexers."""
    balance_weight: float = 1e-4
    """Weight of the sequence-level expert balance loss."""
    bias_rate: float = 1e-3
    """Step of the router bias towards balanced experts; 0 keeps the bias."""
    checkpoint_every: int = 200
    """Steps between checkpoints; one more is written at the end."""
    log_every: int = 1
    """Steps between records in metrics.jsonl."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Which steps are skipped, and how many may be."""
    seed: int = 0
    """Seed of the random weights and of the order of the data."""

    def __post_init__(self) -> None:
        require_at_least(1, steps=self.steps, batch_rows=self.batch_rows, checkpoint_every=self.checkpoint_every,
                          log_every=self.log_every)
        require_at_least(8, length=self.length)
        require_at_least(0, micro_rows=self.micro_rows, mtp_steps=self.mtp_steps, max_minutes=self.max_minutes,
                          mtp_weight=self.mtp_weight, balance_weight=self.balance_weight, bias_rate=self.bias_rate,
                          indexer_weight=self.indexer_weight)
        if self.batch_ramp.first_rows > self.batch_rows:
            raise ConfigError(f"batch_ramp.first_rows={self.batch_ramp.first_rows} exceeds batch_rows="
                              f"{self.batch_rows}")
        if self.micro_rows and self.batch_ramp.first_rows % self.micro_rows:
            raise ConfigError(f"batch_ramp.first_rows={self.batch_ramp.first_rows}: must be whole micro-batches of "
                              f"micro_rows={self.micro_rows}")
        if self.schedule.warmup_steps > self.steps:
            raise ConfigError(f"schedule.warmup_steps={self.schedule.warmup_steps} exceeds steps={self.steps}")
        if self.init == "random" and not self.tokenizer:
            raise ConfigError('init="random" needs tokenizer: give the directory of a tokenizer')
        if self.recipe.conversations and not self.data.conversations:
            raise ConfigError(f"stage={self.stage!r} needs data.conversations: give .jsonl files of conversations")
        if not self.recipe.trains_main and not self.train_indexer:
            raise ConfigError(f"stage={self.stage!r} trains the indexers only: set train_indexer=true")

    @property
    def recipe(self) -> Recipe:
        """What this stage trains."""
        return RECIPES[self.stage]

    @property
    def trains_indexer(self) -> bool:
        """Whether the indexers learn here."""
        return self.recipe.trains_indexer and self.train_indexer
