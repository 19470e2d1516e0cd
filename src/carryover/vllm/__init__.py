"""Carryover inside vLLM: a plugin with which `vllm serve` runs this project's drafters, carry rows included.

    vllm serve TARGET --speculative-config '{"method": "dflash", "model": DRAFTER, "num_speculative_tokens": N}'

`plugin.py` is the entry point and the only file that changes anything in vLLM; `internals.py` says what of vLLM the
plugin is built on and refuses any other; `checkpoint.py` recognises a drafter and says which settings it cannot run
with; `model.py` and `proposer.py` are the drafter and its round, subclasses of vLLM's own; `layout.py` is the one place
that knows where context, carry and block rows lie in vLLM's paged cache. `serve.py`, `offline.py` and `online.py` start
and measure servers; they run in a process that has vLLM, and import nothing of the plugin.
"""
