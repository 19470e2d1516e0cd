"""`carryover evaluate --engine vllm`: vLLM in the place of the embedded engine; same prompts, same results file.

Every method has a vLLM of its own that stays loaded, and they take turns, as in `evaluate/run.py`. What vLLM does not
tell stays unknown: of a round's proposals the rejected ones are -1, how its time divides is not known, and of the last
token of a response, not whether it was accepted or a correction, so it counts as one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from ..decode.engine import Request
from ..decode.trace import Generation, Round
from ..drafter.modeling import Drafter
from ..embedded import located
from ..errors import InputError
from ..evaluate.run import Drafting, Plan
from ..formats import save_drafter
from ..formats.files import locate
from ..target import Target
from .serve import environment, speculation

UNKNOWN = -1  # in the place of a proposal that vLLM does not report
KV_GIB = 1  # of each worker on a CPU


class VllmEngine:
    """A worker process with one vLLM, behind the methods of `decode.engine.Engine` that an evaluation calls."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        folder: Path | None,
        plan: Plan,
        python: str,
        proposals: int | None = None,
    ) -> None:
        """folder: where the drafter lies. python: that of an environment with vLLM. proposals: None: as trained."""
        self.target, self.plan = target, plan
        self.carries = drafter is not None and drafter.config.carry != "none"
        self.proposals = 0 if drafter is None else proposals or drafter.config.num_proposals
        on_cpu = target.device.type == "cpu"
        path = located(str(target.name))
        asked: dict[str, Any] = {
            "model": path,
            "dtype": str(target.dtype).removeprefix("torch."),
            "max_num_seqs": plan.batch_size,
            "enforce_eager": on_cpu and not plan.compile,
            "disable_log_stats": False,
            "enable_prefix_caching": False,  # the embedded engine keeps nothing between prompts either
        }
        if folder is not None:
            asked["speculative_config"] = speculation(path, str(folder), proposals, plan.draft_sampling)
        self.counters: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # what a warm-up counted
        self._command = [python, "-m", "carryover.vllm.worker", json.dumps(asked)]
        self._environment = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers take turns; bound, all would sit on the first core
            **os.environ,
            **environment(on_cpu, default_gib=KV_GIB),
        }
        self._worker: subprocess.Popen[str] | None = None  # started when there is something to decode

    def _running(self) -> subprocess.Popen[str]:
        if self._worker is None:
            self._worker = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
            )
            self._read(self._worker)  # it is ready
        return self._worker

    def _read(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise InputError("vLLM ended before it answered; what it said is above.")
        return json.loads(line)

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, seed: int = 0) -> Generation:
        """For warming up: not counted."""
        generation = next(self.generate_many([Request(prompt_ids, max_new_tokens, seed)], 1))[1]
        self._before, self.counters = self._total, {}
        return generation

    def generate_many(self, prompts: Sequence[Request], batch_size: int) -> Iterator[tuple[int, Generation]]:
        """As `Engine.generate_many`; vLLM itself decides what runs together, `batch_size` at most."""
        if not prompts:
            return
        requests = [
            {
                "ids": list(p.ids),
                "max_tokens": min(p.max_new_tokens, self.target.max_length - len(p.ids)),
                "seed": p.seed,
            }
            for p in prompts
        ]
        worker = self._running()
        assert worker.stdin is not None
        print(json.dumps({"requests": requests, "sampling": self._sampling()}), file=worker.stdin, flush=True)
        reply = self._read(worker)
        self._total = reply["counters"]
        self.counters = {name: less(value, self._before.get(name)) for name, value in self._total.items()}
        for i, (prompt, response) in enumerate(zip(prompts, reply["responses"], strict=True)):
            yield i, self._generation(prompt, response)

    def _sampling(self) -> dict[str, Any]:
        penalties = self.plan.penalties
        return {
            **asdict(self.plan.sampling),
            "top_k": self.plan.sampling.top_k or -1,
            "repetition_penalty": penalties.repetition,
            "presence_penalty": penalties.presence,
            "frequency_penalty": penalties.frequency,
            "min_tokens": penalties.min_new_tokens,
            "stop_token_ids": sorted(self.target.stop_ids),
        }

    def _generation(self, prompt: Request, response: dict[str, Any]) -> Generation:
        """The first step's token is the prefill's; every later step is a round (or a plain step without a drafter)."""
        steps, anchor, carried = response["steps"], len(prompt.ids), 0
        generation = Generation(len(prompt.ids), [token for step in steps for token in step])
        generation.finish = "stop" if response["finish"] == "stop" else "length"
        generation.seconds, generation.prefill_seconds = response["seconds"], response["first_seconds"]
        for step in steps[1:]:
            accepted = len(step) - 1
            proposals = step[:-1] + [UNKNOWN] * (self.proposals - accepted)
            generation.rounds.append(Round(anchor, proposals, accepted, step, carried))
            anchor += len(step)
            carried = self.proposals - accepted if self.carries else 0
        return generation

    def warm_up(self, prompt: Request, longest: int, slots: int = 1) -> None:
        """vLLM has warmed itself up."""

    def close(self, patience: float = 30) -> None:
        """Ends the worker, after `patience` seconds in which it may end by itself."""
        if self._worker is None:
            return
        if self._worker.stdin is not None:
            self._worker.stdin.close()
        try:
            self._worker.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            self._worker.wait()


def less(value: Any, before: Any) -> Any:
    """A count, or counts by position, since another time; None: the start."""
    if before is None:
        return value
    return [a - b for a, b in zip(value, before, strict=True)] if isinstance(value, list) else value - before


class Workers:
    """Makes the engines of an evaluation and ends them with it. The place of `evaluate.run.EmbeddedEngines`."""

    name = "vllm"

    def __init__(self, out: Path, python: str) -> None:
        """out: the evaluation's folder; drafters without their carry are written there, for `--carry-off`. python: that
        of an environment with vLLM."""
        self.out, self.python = out, python
        self.engines: list[VllmEngine] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for engine in self.engines:
            engine.close(patience=30 if kind is None else 0)

    def make(self, target: Target, plan: Plan, how: Drafting) -> VllmEngine:
        if how.rows is not None or plan.stop_loops:
            raise InputError("a limit on carry rows and a stop at loops are for the embedded engine; vLLM has neither.")
        drafter, folder = how.drafter, None if how.path is None else locate(how.path)
        if drafter is not None and drafter.config.carry != "none" and not how.carry:
            drafter, folder = self._without_carry(drafter)
        if how.proposals == "auto":
            raise InputError("vLLM drafts one number of proposals; auto is for the embedded engine.")
        self.engines.append(VllmEngine(target, drafter, folder, plan, self.python, how.proposals))
        return self.engines[-1]

    def _without_carry(self, drafter: Drafter) -> tuple[Drafter, Path]:
        plain = drafter.without_carry()
        folder = self.out / "carry-off" / plain.digest()
        if not folder.exists():
            save_drafter(plain, folder)
        return plain, folder
