"""One vLLM engine that answers one request at a time, for `peers.py`. Runs in vLLM's own Python, without this package.

    python vllm_worker.py '{"model": FOLDER, ...}'      the arguments of `vllm.LLM`

Prints a line of JSON when it is ready; then reads `{"ids", "tokens", "stop"}` lines from stdin and answers each with
`{"tokens", "seconds", "drafts", "accepted"}`; the last two are totals since the start.
"""

import json
import os
import sys
import time


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    import vllm

    llm = vllm.LLM(**json.loads(sys.argv[1]))

    def reply(**values: object) -> None:
        print(json.dumps(values), file=replies, flush=True)

    reply(version=vllm.__version__)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=asked["tokens"], stop_token_ids=asked["stop"], detokenize=False
        )
        began = time.perf_counter()
        (out,) = llm.generate({"prompt_token_ids": asked["ids"]}, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        reply(
            tokens=list(out.outputs[0].token_ids),
            seconds=seconds,
            drafts=counts.get("vllm:spec_decode_num_drafts", 0),
            accepted=counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        )


if __name__ == "__main__":
    main()
