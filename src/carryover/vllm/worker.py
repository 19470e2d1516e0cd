"""One vLLM engine in a process of its own, for `offline.py`: it answers requests and says what each step gave.

    python -m carryover.vllm.worker '{"model": FOLDER, ...}'      the arguments of `vllm.EngineArgs`

Prints a line of JSON when it is ready, and ends when its parent does. Then reads lines `{"requests": [{"ids",
"max_tokens", "seed"}], "sampling"}` from stdin and answers each with `{"responses": [{"steps", "finish", "seconds",
"first_seconds"}], "counters"}`: the tokens that each engine step added to a response, of which the first comes from the
prefill and each other one from a verification; the response's share of the time; and vLLM's own counts of speculative
decoding since the start.

A request's share of a step's time is the same for all that are unfinished, as in the embedded engine.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

PREFIX = "vllm:spec_decode_"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    _end_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**json.loads(sys.argv[1])))

    def reply(**values: Any) -> None:
        print(json.dumps(values), file=replies, flush=True)

    reply(version=vllm.__version__)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        reply(responses=answer(engine, asked["requests"], asked["sampling"], number), counters=counters(engine))


def _end_with_parent() -> None:
    """A parent that is killed closes no pipe politely, and loading takes long before stdin is read."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            sys.exit(1)


def answer(engine: Any, requests: list[dict[str, Any]], sampling: dict[str, Any], group: int) -> list[dict[str, Any]]:
    """Runs requests together until all are done."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    responses: dict[str, dict[str, Any]] = {}
    began = time.perf_counter()
    for i, request in enumerate(requests):
        params = SamplingParams(
            **sampling,
            max_tokens=request["max_tokens"],
            seed=request["seed"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(f"{group}-{i}", {"prompt_token_ids": request["ids"]}, params)
        responses[f"{group}-{i}"] = {"steps": [], "finish": None, "seconds": 0.0, "first_seconds": 0.0}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        share, began = (now - began) / sum(r["finish"] is None for r in responses.values()), now
        for response in responses.values():
            if response["finish"] is None:
                response["seconds"] += share
        for output in outputs:
            response = responses[output.request_id]
            if ids := list(output.outputs[0].token_ids):
                response["first_seconds"] = response["first_seconds"] or response["seconds"]
                response["steps"].append(ids)
            if output.finished:
                response["finish"] = output.outputs[0].finish_reason
    return list(responses.values())


def counters(engine: Any) -> dict[str, Any]:
    """`num_drafts`, `num_draft_tokens`, `num_accepted_tokens`, `num_accepted_tokens_per_pos`; none without drafts."""
    return {
        metric.name.removeprefix(PREFIX): getattr(metric, "values", None) or metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith(PREFIX)
    }


if __name__ == "__main__":
    main()
