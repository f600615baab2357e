"""One round of continual learning: filter → SFT → preferences → gate → publish, each step ended by one file.

A round is a run directory. A step that has its file is skipped, a training step goes on from its newest checkpoint, and
every file and directory appears by a rename: a round that is killed anywhere and started again ends as if it had not
been. What is filtered is what was recorded when the round began. ``published/`` is the new model and appears last, only
when the gate lets it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.config import load_config
from glm5.continual.config import ContinualConfig
from glm5.continual.gate import gate_rows, refusal
from glm5.continual.selection import Message, Selection, read_collection, select
from glm5.data.conversations import Conversation, render_conversation
from glm5.errors import ConfigError, DataError
from glm5.process import lock_directory
from glm5.rl.config import RLConfig
from glm5.runlog import RunLog, write_atomic
from glm5.tokenizer.bpe import Tokenizer, load_tokenizer

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """How a round ended."""

    rows: list[Row]
    refusal: str
    """Why nothing was published; "" when something was."""
    published: Path | None
    """The new model."""


def filter_collections(config: ContinualConfig) -> Selection:
    """What the recorded answers give. Raises DataError, CheckpointError."""
    tokenizer = load_tokenizer(config.sft.init)
    exchanges, bad = [], 0
    for directory in config.collections:
        found, unusable = read_collection(Path(directory))
        exchanges += found
        bad += unusable
    selection = select(exchanges, config.filter, _fit_check(tokenizer, config))
    if bad:
        selection.counts["unreadable"] += bad
    return selection


def run_continual(config: ContinualConfig, rollouts: RLConfig, run_dir: Path) -> Result:
    """One round from start to end, or the rest of one. Raises ConfigError when ``run_dir`` holds another round."""
    return _Round(config, rollouts, run_dir).run()


def read_rollouts(config: ContinualConfig, path: Path) -> RLConfig:
    """The RL file of the gate, next to the file ``path``; rewards are those of the verifiers alone."""
    rollouts = load_config(RLConfig, path.parent / config.gate.rollouts)
    return dataclasses.replace(rollouts, rewards={}, reward_model="", anchors_per_group=0)


class _Round:
    """Every method is a step that does nothing when its result exists."""

    def __init__(self, config: ContinualConfig, rollouts: RLConfig, run_dir: Path) -> None:
        self.config, self.rollouts, self.run_dir = config, rollouts, run_dir
        self._checkpoint = Path(config.sft.init)

    def run(self) -> Result:
        settings = {"continual": dataclasses.asdict(self.config), "rollouts": dataclasses.asdict(self.rollouts)}
        with lock_directory(self.run_dir):
            self._check_settings(settings)
            log = RunLog(self.run_dir)
            log.write_config(settings)
            rows = self._filter()
            candidate = self._train_preferences(self._train_sft())
            before = self._outcomes("before", self._checkpoint)
            after = self._outcomes("after", candidate)
            gate = gate_rows(before, after, self.config.gate.max_drop)
            refused = refusal(gate)
            published = None if refused else self._publish(candidate)
            log.event("round_finished", refusal=refused, published=str(published or ""))
            decision = {"published": published is not None, "refusal": refused, "rows": gate}
            write_atomic(self.run_dir / "decision.json", json.dumps(decision, indent=1) + "\n")
        return Result([*rows, *gate], refused, published)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        path = self.run_dir / "config.json"
        if not path.exists():
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        now = json.loads(json.dumps(settings, default=str))
        if before != now:
            changed = [f"{part}.{key}" for part in now for key in now[part]
                       if before.get(part, {}).get(key) != now[part][key]]
            raise ConfigError(f"{self.run_dir}: holds a round with other settings ({(changed or ['keys'])[0]}); "
                              "use another --run-dir, or remove this one to start again")

    def _filter(self) -> list[Row]:
        path = self.run_dir / "filter.json"
        if not path.exists():
            selection = filter_collections(self.config)
            if len(selection.conversations) < self.config.min_conversations:
                raise DataError(f"{len(selection.conversations)} answers are left of the collections (fates: "
                                f"{dict(selection.counts)}), min_conversations={self.config.min_conversations}; "
                                "collect more or relax [filter]")
            for name, records in (("kept.jsonl", selection.conversations), ("pairs.jsonl", selection.pairs)):
                write_atomic(self.run_dir / name, "".join(json.dumps(record) + "\n" for record in records))
            write_atomic(path, json.dumps(selection.rows(), indent=1) + "\n")
        return list(json.loads(path.read_text(encoding="utf-8")))

    def _train_sft(self) -> Path:
        from glm5.train.stages import run_stage

        stage = self.config.sft
        conversations = (str(self.run_dir / "kept.jsonl"), *stage.data.conversations)
        data = dataclasses.replace(stage.data, conversations=conversations, held_out_rows=0)
        return run_stage(dataclasses.replace(stage, data=data), self.run_dir / "sft")

    def _train_preferences(self, start: Path) -> Path:
        from glm5.train.preferences import run_preferences

        pairs = self.run_dir / "pairs.jsonl"
        if self.config.preference is None or not pairs.stat().st_size:
            return start
        chosen = dataclasses.replace(self.config.preference, init=str(start), pairs=(str(pairs),))
        return run_preferences(chosen, self.run_dir / "preference")

    def _outcomes(self, when: str, checkpoint: Path) -> dict[str, bool]:
        """Which held-out tasks ``checkpoint`` solves."""
        from glm5.records import TRAINABLE_OUTCOMES
        from glm5.rl.launch.local import RolloutStack

        path = self.run_dir / f"{when}.json"
        if not path.exists():
            with RolloutStack(self.rollouts, checkpoint, self.run_dir / f"evaluate-{when}") as stack:
                episodes = stack.evaluate(count=self.config.gate.tasks, temperature=self.config.gate.temperature,
                                          label=when)
            solved = {episode.task_id: episode.reward >= 1 for episode in episodes
                      if episode.outcome in TRAINABLE_OUTCOMES and episode.reward is not None}
            write_atomic(path, json.dumps(solved, indent=1) + "\n")
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def _publish(self, candidate: Path) -> Path:
        from glm5.model.checkpoint import load_model, save_model

        target = self.run_dir / "published"
        if not target.exists():
            save_model(load_model(candidate), target, self._checkpoint)
        return target


def _fit_check(tokenizer: Tokenizer, config: ContinualConfig) -> Callable[..., str]:
    def misfit(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            sample = render_conversation(Conversation(messages, tools, "collection"), tokenizer,
                                         config.sft.data.declare_tools)
        except DataError:
            return "unusable"
        return "too_long" if len(sample.ids) > config.sft.length else ""

    return misfit
