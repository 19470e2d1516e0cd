"""The recipe: one YAML file that says everything about a drafter and how it is trained, read strictly.

Unknown keys are errors that name the closest valid key; whatever the file leaves out is resolved on loading
(`fill_in`), so a loaded recipe has no open defaults and `to_yaml` shows what a run really used. The only values
resolved later are those that depend on the target's weights and tokenizer: `drafter_config` does that.

Letters: `B` block rows, `M` captured layers. Source: SPEC 0.1 (decisions), 2.3, 3.2.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from .decode.sampling import Sampling
from .drafter.config import Carry, CarrySite, DrafterConfig, Hint, MarkovKind, Projector, Slots
from .errors import InputError
from .layer_ids import LayerIds

if TYPE_CHECKING:
    from .target import Target

Algorithm = Literal["dflash", "markov"]
Stage = Literal["baseline", "continued", "carryover"]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, AfterValidator(lambda value: Sampling(value).temperature)]


def _temperatures(value: Any) -> float | tuple[float, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    if not values or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise InputError(f"must be a number or a list of numbers, got {value!r}")
    checked = tuple(Sampling(float(v)).temperature for v in values)
    return checked if isinstance(value, list | tuple) else checked[0]


Temperatures = Annotated[
    float | tuple[float, ...],
    PlainValidator(_temperatures),
    PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value),
]
Paths = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Section(BaseModel):
    """A group of keys. Nothing else is allowed in it, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MarkovConfig(Section):
    """The first-order head of `algorithm: markov` (SPEC 3.1)."""

    rank: Count = 256
    kind: MarkovKind = "vanilla"  # vLLM serves vanilla only


class DrafterShape(Section):
    """The drafter's architecture; widths that are not given are the target's."""

    algorithm: Algorithm
    layers: Count = 5
    block_size: Annotated[int, Field(ge=1, strict=True)] = 16  # B query rows: the anchor and B - 1 masks
    slots: Slots  # left out: fill_in (B - 1 proposals) for dflash, next_token (B proposals) for markov
    target_layer_ids: tuple[int, ...] | None = None  # z-lab numbering; null: `captured` layers, evenly spaced
    captured: Count | None = None  # M, used where target_layer_ids is null; null: as many as draft layers
    draft_vocab_size: Count | None = None  # propose only the corpus's most frequent tokens, so many; null: any token
    mask_token_id: int | None = None  # a row of the target's embedding; null: see `resolve_mask_token`
    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rope_theta: Positive | None = None  # null: the target's; the rotation always covers the whole head (SPEC 1.4)
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None  # null: all full attention
    sliding_window: Count | None = None
    sliding_window_from_anchor: bool = False
    sliding_causal: bool = False
    markov: MarkovConfig | None = None
    confidence: bool = False  # a head that predicts acceptance; none is trained, so true is refused
    start: str = "random"  # what the baseline begins with: random, target (its last layers), or another drafter

    @property
    def start_drafter(self) -> str | None:
        """The drafter that the baseline begins with, if it does with one."""
        return None if self.start in ("random", "target") else self.start

    @model_validator(mode="after")
    def _consistent(self) -> DrafterShape:
        if self.algorithm == "dflash" and self.markov:
            raise InputError("markov is for algorithm: markov; a dflash drafter has no such head")
        if self.confidence:
            raise InputError("confidence heads are read from and written to checkpoints, but not trained; leave it out")
        if self.target_layer_ids is not None:
            LayerIds(self.target_layer_ids)
            if self.captured not in (None, len(self.target_layer_ids)):
                raise InputError("captured counts the layers that target_layer_ids already names; give one of them")
        return self


class CarryConfig(Section):
    """How the states of rejected proposals enter the next draft (SPEC 0.1 #4 and 7)."""

    interface: Carry = "embedding"
    site: CarrySite = "pre_norm"
    projector: Projector = "fc_copy"  # used by interface: projector
    hint: Hint = "rejected_tokens"  # used by interface: hint, which carries tokens instead of states


class DataConfig(Section):
    """The recorded responses a drafter learns from, and how they are cut."""

    corpus: Paths = ()  # JSONL files, folders; empty: what the record section produces
    template: dict[str, Any] = {}  # options of the chat template (enable_thinking, ...), evaluation included
    max_length: Count = 2048  # tokens of a document; longer ones are cut, never down to their prompt
    sequence_length: Count  # tokens of a packed row; left out: max_length
    minimum_response_tokens: Annotated[int, Field(ge=2)] = 2  # the least that teaches: an anchor and a label

    @field_validator("template")
    @classmethod
    def _plain(cls, template: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(template, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"options of a template must be plain values ({error}); put dates in quotes") from error
        return template

    @model_validator(mode="after")
    def _rows_hold_documents(self) -> DataConfig:
        if self.sequence_length < self.max_length:
            raise InputError("sequence_length must be at least max_length, because a document is never split over rows")
        return self


class RecordConfig(Section):
    """How the target's responses are generated."""

    prompts: Paths = ()  # JSONL files, folders or names of packaged suites
    tasks: tuple[str, ...] | None = None  # null: all
    limit: Count | None = None  # prompts, balanced over tasks
    # Several: one response to every prompt at each, with other random numbers, so [0, 0.7, 0.7] gives three.
    temperature: Temperatures = 0.7
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    max_new_tokens: Count = 512
    batch_size: Count = 16


class LossConfig(Section):
    """`ce` times cross-entropy with the recorded token, plus `l1` times the plain L1 distance (0 to 2) to the target's
    distribution, plus `kl` times the Kullback-Leibler divergence from it, among the tokens that can be proposed.

    Left out: ce 1, l1 0 for dflash; ce 0.1, l1 0.9 for markov; gamma by the size of the block (`default_gamma`).
    """

    ce: NotNegative
    l1: NotNegative
    kl: NotNegative = 0.0
    weighting: Literal["decay", "dpace"] = "decay"
    gamma: Positive  # decay: proposal i (from 0) weighs exp(-i / gamma)
    dpace_alpha: Share = 0.5

    @model_validator(mode="after")
    def _some_loss(self) -> LossConfig:
        if not self.ce and not self.l1 and not self.kl:
            raise InputError("ce, l1 and kl are all 0, so nothing would be learnt")
        return self


class StageConfig(Section):
    """How one stage is trained. Exactly one of steps and epochs."""

    steps: Count | None = None  # optimizer steps
    epochs: Positive | None = None
    learning_rate: Positive = 6e-4
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.04
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive = 1.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    precision: Literal["auto", "fp32", "bf16"] = "fp32"  # bf16: autocast over fp32 master weights; auto: if it is fast
    batch_size: Count = 1  # packed rows per device and micro-batch
    accumulation: Count = 1  # micro-batches per optimizer step
    anchors: Count = 512  # per document, not per packed row
    keep_features: bool = False  # keep the target's states on disk after the first epoch; carryover needs it live
    loss: LossConfig
    logging_steps: Count = 10
    save_steps: Count = 500
    eval_steps: Annotated[int, Field(ge=0)] = 0  # decode eval_prompts with the real engine this often; 0: never
    eval_prompts: str | None = None  # prompts for that: neither in the corpus nor in evaluate.prompts

    @model_validator(mode="after")
    def _one_length(self) -> StageConfig:
        if (self.steps is None) == (self.epochs is None):
            raise InputError("give exactly one of steps and epochs")
        if self.eval_steps and not self.eval_prompts:
            raise InputError("eval_steps is set, so eval_prompts must name a prompt file")
        return self


class CarryoverConfig(StageConfig):
    """The stage that trains draft-verify-draft (SPEC 6.2 to 6.4)."""

    acceptance: Literal["recorded", "target_guarded"] = "recorded"  # V1 or V2g of SPEC 6.3
    first_pass_loss: NotNegative = 0.0  # weight of a loss on the first draft; 0: gradient through the second only
    carry_dropout: Share = 0.0  # share of anchors whose carry rows are withheld
    proposal_temperature: Temperature = 0.0  # of the first draft; 0: argmax (SPEC 6.4-D)
    unroll: Annotated[int, Field(ge=1, le=4)] = (
        1  # rounds before the draft with a loss; all but the first carry (6.4-C)
    )


class TrainConfig(Section):
    """The three stages. A stage's key written directly under `train` holds for every stage that does not set its own.

    continued is the control of carryover (same extra steps, no carry): what it leaves out it takes from carryover.
    """

    baseline: StageConfig
    continued: StageConfig
    carryover: CarryoverConfig


class EvaluateConfig(Section):
    """What the drafters are measured on. These prompts are never trained on."""

    prompts: Paths = ()
    tasks: tuple[str, ...] | None = None
    limit: Count | None = None
    max_new_tokens: Count = 512
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)] = (0.0,)
    draft_sampling: Literal["greedy", "probabilistic"] = "probabilistic"  # used above temperature 0 (SPEC 0.1 #9)
    carry_off: bool = True  # decode with carryover once more, without its carry
    batch_size: Count = 1  # requests that decode together; 1 measures latency, more is quicker
    stop_loops: bool = False  # end responses of all methods where they become degenerate loops


class Recipe(Section):
    """A whole run: target, drafter, data, training, evaluation."""

    target: str  # folder, hub id, `smollm2` or `lab`
    target_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    drafter: DrafterShape
    carry: CarryConfig = CarryConfig()
    data: DataConfig
    record: RecordConfig = RecordConfig()
    train: TrainConfig
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _folders_differ(self) -> Recipe:
        names = [f"{t:g}" for t in self.evaluate.temperatures]
        if len(set(names)) < len(names):
            raise InputError(f"evaluate.temperatures must differ in six digits, got {', '.join(names)}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, raw: Any) -> Any:
        return fill_in(raw) if isinstance(raw, Mapping) else raw

    @model_validator(mode="after")
    def _has_data(self) -> Recipe:
        if not self.data.corpus and not self.record.prompts:
            raise InputError("data.corpus and record.prompts are both empty, so there is nothing to train on")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Reads a YAML file; overrides are `dotted.key=value` with a YAML value. Raises InputError in one sentence."""
        raw = _read(path)
        if grid := [key for key in ("cells", "seeds") if key in raw]:
            raise InputError(f"the recipe {path} is a grid (it has {' and '.join(grid)}); `carryover run` runs it.")
        return cls._resolved(raw, path, overrides)

    @classmethod
    def load_grid(cls, path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Recipe]:
        """The recipes of a file by name. Most hold one, named ``.

        A grid holds `cells`, a mapping of names to what each changes, and `seeds`; its recipes are named CELL-sSEED.
        Overrides apply to all of them, but those of `seeds` and `cells` to the grid.
        """
        raw = _read(path)
        if not {"cells", "seeds"} & raw.keys():
            return {"": cls._resolved(raw, path, overrides)}
        of_grid = [override for override in overrides if override.partition("=")[0].split(".")[0] in ("cells", "seeds")]
        overrides = [override for override in overrides if override not in of_grid]
        for override in of_grid:
            _override(raw, override)
        cells, seeds = raw.pop("cells", None), raw.pop("seeds", None)
        if not isinstance(cells, dict) or not all(isinstance(change, dict) for change in cells.values()):
            raise InputError(f"recipe {path}: cells must map names to the keys that each cell changes.")
        for cell in cells:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,99}", str(cell)) or re.search(r"-s\d+$", str(cell)):
                raise InputError(
                    f"recipe {path}: cells name folders, CELL-sSEED, so {cell!r} must be of at most 100 letters, "
                    "digits, dots, dashes and underscores, and not end like a seed."
                )
        if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in seeds):
            raise InputError(f"recipe {path}: a grid needs seeds, a list of whole numbers.")
        if not cells or len(set(seeds)) < len(seeds):
            raise InputError(f"recipe {path}: a grid needs at least one cell, and each seed once.")
        if any("seed" in change for change in cells.values()) or any(o.partition("=")[0] == "seed" for o in overrides):
            raise InputError(f"recipe {path}: the seeds of a grid are its key seeds (--set seeds=[0,1]), not seed.")
        return {
            f"{cell}-s{seed}": cls._resolved(_merged(raw, {**change, "seed": seed}), path, overrides, f"cell {cell}: ")
            for seed in seeds
            for cell, change in cells.items()
        }

    @classmethod
    def _resolved(cls, raw: dict[str, Any], path: str | Path, overrides: Sequence[str], where: str = "") -> Recipe:
        for override in overrides:
            _override(raw, override)
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise InputError(f"recipe {path}: {where}{_explain(error, raw)}") from error

    def to_yaml(self) -> str:
        """The resolved recipe; loading it again gives an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        raw = yaml.load(Path(path).read_text(encoding="utf-8"), _NoRepeats)
    except OSError as error:
        raise InputError(f"cannot read the recipe {path}: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of encodings, dates and huge numbers
        raise InputError(f"the recipe {path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(raw, dict):
        raise InputError(f"the recipe {path} must be a mapping of keys such as target, drafter, data, train.")
    return raw


def _merged(base: Any, change: Any) -> Any:
    """A copy of `base` with the keys of `change` over it, group by group."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return deepcopy(change)
    return {
        key: _merged(base.get(key), change[key]) if key in change else deepcopy(base[key]) for key in {**base, **change}
    }


class _NoRepeats(yaml.SafeLoader):
    """YAML says that a repeated key is an error; its parser lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} is repeated", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# ---- what the file leaves out ----------------------------------------------------------------------------------------
STAGES: dict[str, type[StageConfig]] = {"baseline": StageConfig, "continued": StageConfig, "carryover": CarryoverConfig}


def default_gamma(block_size: int) -> float:
    """Decay of the position weights: 4 for blocks up to 8 rows, 5 up to 12, 7 beyond (public configurations, SPEC
    2.3)."""
    return 4.0 if block_size <= 8 else 5.0 if block_size <= 12 else 7.0


def completed(kind: type[Section], recorded: dict[str, Any]) -> dict[str, Any]:
    """A resolved section out of a file of an earlier version: keys that did not exist then have their defaults."""
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section) and isinstance(recorded.get(name), dict):
            recorded = {**recorded, name: completed(inner, recorded[name])}
        elif name not in recorded and not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
            recorded = {**recorded, name: default.model_dump(mode="json") if isinstance(default, Section) else default}
    return recorded


def fill_in(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Resolves every default that depends on another key. Values of the wrong type are left for validation to name."""
    raw = deepcopy(raw)
    drafter, data, train = ({**raw[k]} if isinstance(raw.get(k), Mapping) else {} for k in ("drafter", "data", "train"))
    markov = drafter.get("algorithm") == "markov"
    if drafter.get("slots") is None:
        drafter["slots"] = "next_token" if markov else "fill_in"
    if markov and drafter.get("markov") is None:
        drafter["markov"] = {}
    if data.get("sequence_length") is None:
        data["sequence_length"] = data.get("max_length", DataConfig.model_fields["max_length"].default)
    block = drafter.get("block_size", DrafterShape.model_fields["block_size"].default)
    gamma = default_gamma(block) if isinstance(block, int) else 7.0
    filled = {"drafter": drafter, "data": data, "train": _stages(train, markov, gamma)}
    return {**raw, **{key: value for key, value in filled.items() if isinstance(raw.get(key, {}), Mapping)}}


def _stages(train: dict[str, Any], markov: bool, gamma: float) -> dict[str, Any]:
    """Spreads the keys written under `train` over the stages, and resolves each stage's loss."""
    shared = {key: train.pop(key) for key in list(train) if key in CarryoverConfig.model_fields}
    own = {stage: train.get(stage, {}) for stage in STAGES}
    if isinstance(own["carryover"], Mapping) and isinstance(own["continued"], Mapping):
        own["continued"] = _over(own["continued"], own["carryover"], StageConfig)
    for stage, kind in STAGES.items():
        if not isinstance(own[stage], Mapping):
            continue
        train[stage] = _over(own[stage], shared, kind)
        loss = train[stage].setdefault("loss", {})
        if isinstance(loss, Mapping):
            weights = {"ce": 0.1, "l1": 0.9} if markov else {"ce": 1.0, "l1": 0.0}
            given = {key: value for key, value in loss.items() if value is not None}
            train[stage]["loss"] = {**weights, "gamma": gamma, **given}
    return train


def _over(own: Mapping[str, Any], shared: Mapping[str, Any], kind: type[StageConfig]) -> dict[str, Any]:
    """`own` on top of the keys of `shared` that such a stage has; steps and epochs replace each other."""
    result = {key: value for key, value in shared.items() if key in kind.model_fields}
    if own.get("steps") is not None or own.get("epochs") is not None:
        result.pop("steps", None)
        result.pop("epochs", None)
    both = isinstance(own.get("loss"), Mapping) and isinstance(result.get("loss"), Mapping)
    return {**result, **own, **({"loss": {**result["loss"], **own["loss"]}} if both else {})}


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"the override {override!r} must look like train.baseline.steps=100.")
    try:
        parsed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"the value of the override {override!r} is not valid YAML.") from error
    *parents, last = key.split(".")
    for parent in parents:
        if raw.get(parent) is None:
            raw[parent] = {}
        raw = raw[parent]
        if not isinstance(raw, dict):
            raise InputError(f"the override {override!r} goes below {parent}, which is a value, not a group.")
    raw[last] = parsed


# ---- what is wrong with it -------------------------------------------------------------------------------------------
def _explain(error: ValidationError, raw: dict[str, Any]) -> str:
    """The first problem as one sentence, with the path as the user wrote it."""
    problems = error.errors()
    ranks = {"extra_forbidden": 0, "value_error": 2}  # a group is checked for consistency last
    first = min(problems, key=lambda problem: ranks.get(problem["type"], 1))
    place = [str(part) for part in first["loc"]]
    path = _as_written(place, raw)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(path)}; {_suggestion(path, place)}{more}."
    if first["type"] == "missing":
        return f"{'.'.join(path)} is missing{more}."
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    got = "" if first["type"] == "value_error" else f", got {first['input']!r}"
    return f"{'.'.join(path) + ': ' if path else ''}{message[:1].lower()}{message[1:]}{got}{more}."


def _as_written(path: list[str], raw: Any) -> list[str]:
    """`train.baseline.x` that was spread from `train.x` is called `train.x`, or where else it was written."""
    if len(path) > 2 and path[0] == "train" and path[1] in STAGES and isinstance(raw.get("train"), Mapping):
        for source in ([path[1]], ["carryover"], []):
            place: Any = raw["train"]
            for part in [*source, *path[2:]]:
                place = place.get(part, raw) if isinstance(place, Mapping) else raw
            if place is not raw:
                return ["train", *source, *path[2:]]
    return path


def _suggestion(path: list[str], place: list[str]) -> str:
    """What the unknown key, written at `path` and validated at `place`, was probably meant to be."""
    groups = dict(_keys(Recipe))
    name, siblings = path[-1], list(groups.get(".".join(place[:-1]), ()))
    if path[:-1] == ["train"]:
        siblings += CarryoverConfig.model_fields
    elsewhere = [f"{group}.{name}".lstrip(".") for group, keys in groups.items() if name in keys]
    if elsewhere:
        return f"it belongs in {elsewhere[0]}"
    if close := difflib.get_close_matches(name, siblings, 1):
        return f"did you mean {'.'.join([*path[:-1], close[0]])}"
    return f"valid keys there are {', '.join(siblings)}"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every group of keys of a recipe, by its dotted path."""
    yield prefix, list(model.model_fields)
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, f"{prefix}.{name}".lstrip("."))


# ---- what depends on the target --------------------------------------------------------------------------------------
def drafter_config(recipe: Recipe, target: Target) -> DrafterConfig:
    """The checked configuration of the recipe's drafter for a loaded target, with the recipe's carry interface.

    Raises InputError when the layers do not exist or no mask token can be found.
    """
    shape, of_target, layers = recipe.drafter, target.config, recipe.drafter.layers
    heads = of_target.num_attention_heads
    ids = shape.target_layer_ids or LayerIds.evenly_spaced(target.num_layers, shape.captured or layers)
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size or of_target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads or heads,
        num_key_value_heads=shape.num_key_value_heads or of_target.num_key_value_heads,
        head_dim=shape.head_dim or getattr(of_target, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=of_target.rms_norm_eps,
        max_position_embeddings=target.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta or _rope_theta(of_target)},
        layer_types=list(shape.layer_types) if shape.layer_types else None,
        sliding_window=shape.sliding_window,
        sliding_window_from_anchor=shape.sliding_window_from_anchor,
        sliding_causal=shape.sliding_causal,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        target_layer_ids=list(ids),
        target_name=str(target.name),
        target_fingerprint=target.fingerprint(),
        block_size=shape.block_size,
        slots=shape.slots,
        mask_token_id=resolve_mask_token(shape.mask_token_id, target),
        draft_vocab_size=shape.draft_vocab_size or 0,
        markov_rank=shape.markov.rank if shape.markov else 0,
        markov_kind=shape.markov.kind if shape.markov else "vanilla",
        confidence=shape.confidence,
        confidence_with_markov=shape.markov is not None,
        carry=recipe.carry.interface,
        carry_site=recipe.carry.site,
        carry_projector=recipe.carry.projector,
        carry_hint=recipe.carry.hint,
    ).checked()


def _rope_theta(config: Any) -> float:
    """The target's base, of its full-attention layers where layer types differ (Gemma)."""
    rope = config.rope_parameters
    return float(rope.get("full_attention", rope)["rope_theta"])


def resolve_mask_token(explicit: int | None, target: Target) -> int:
    """The row of the target's embedding that stands for an unknown token: given, or the tokenizer's mask token, or the
    first row of a padded embedding that no token uses. Never pad or an end token by itself (SPEC 1.3, 9.15)."""
    if explicit is not None:
        return explicit
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise InputError("drafter.mask_token_id must be given, because the target has no tokenizer to find one in.")
    taken = {*target.stop_ids, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id not in taken:
        return tokenizer.mask_token_id
    used = max(tokenizer.get_vocab().values())
    if used + 1 < target.vocab_size:
        return used + 1
    special = [(i, token.content) for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else ""
    spare = [f"{i} ({text})" for i, text in special if i not in taken and text not in shown][-3:]
    raise InputError(
        f"target {target.name!r} has no mask token and no unused embedding row ({target.vocab_size} tokens fill it); "
        "set drafter.mask_token_id to a token that responses never contain"
        + (f", for example {', '.join(spare)}." if spare else ", for example a reserved special token.")
    )
