"""How weights lie in memory, and how few rows are multiplied with them on a CPU. No value changes, only speed.

A round of speculation multiplies 1 to 16 rows with every weight of the target, and which routine does that best differs
by processor, shape, precision and number of threads. So each shape is timed once per machine (`measured`, less than a
second, kept in the cache folder), and every weight is stored as its shape's `Plan` needs it:

    output   as checkpoints store it, `[out, in]`: MKL, or oneDNN in bf16
    input    with a contiguous transpose: MKL is up to twice as fast with few float32 rows on some processors
    packed   as oneDNN asks for it: two to four times as fast for 4 to 16 rows on others

A packed weight replaces the plain one; both are kept only where each is clearly the best for some number of rows. That
at most doubles the memory of a layer; an LM head is kept as it is besides, for training and a tied embedding.
`CARRYOVER_WEIGHTS=plain` or `packed` forces one for every shape and number
of rows, so that a run can be repeated to the bit; sums are taken in another order otherwise.

Letters: `n` rows, `in` and `out` the sizes of a linear layer.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import InputError
from .files import write_text
from .precision import cpu_name, has_bf16_units

STEPS = (1, 2, 4)  # a plan has a way for n = 1, for 2 and 3, and for more
TIMED = (1, 3, 8)  # the rows that these are timed with
SCORED = (1.0, 0.0, 1.0)  # what a storage is chosen by: a plain token and a verification count alike
SECOND_COPY = 0.93  # a second copy of a weight must bring the time below this share
COLD = 40 << 20  # bytes of weights that are read in turn, so that they come from memory and not from a cache; a weight
#                  that is larger itself is timed in part
SMALL = 1 << 16  # numbers; smaller weights stay as they are
BUDGET = 0.5  # seconds, for all shapes together, unless one pass takes longer
FORCED = "CARRYOVER_WEIGHTS"


class Way(NamedTuple):
    """storage: output, input or packed. fill: fewer rows are filled up to so many, which some routines do faster."""

    storage: str
    fill: int = 1

    def __str__(self) -> str:
        return self.storage if self.fill == 1 else f"{self.storage}, {self.fill} rows"


Plan = tuple[Way, Way, Way]  # one for each of STEPS
PACKED_PRODUCT: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
INPUT, OUTPUT, PACKED = Way("input"), Way("output"), Way("packed")
PLAIN: Plan = (OUTPUT, OUTPUT, OUTPUT)
PACKED_ALWAYS: Plan = (Way("packed", 4), Way("packed", 4), PACKED)


class Products:
    """Products of rows with one weight `[out, in]`, each as the plan says for its number of rows. No gradient."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, plan: Plan = PLAIN, keep_plain: bool = False
    ) -> None:
        """keep_plain: for `with_gradient`, and where the weight is kept by someone else anyway."""
        self.shape, self.dtype, self.bias, self.plan = tuple(weight.shape), weight.dtype, bias, plan
        self.stored = {storage: _store(weight, storage) for storage in {way.storage for way in plan}}
        self.plain = weight if keep_plain else None
        self.ways = [(way.storage == "packed", self.stored[way.storage], way.fill) for way in plan]

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        count = x.numel() // self.shape[1]
        packed, stored, fill = self.ways[0 if count == 1 else 1 if count < STEPS[2] else 2]
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        if not packed or not count:
            # One matrix: a batch with the strides of a slice is a batched product, which copies the weight first.
            flat = x if x.dim() == 2 else x.reshape(-1, self.shape[1])
            return nn.functional.linear(flat, self.weight if packed else stored, self.bias).view(
                *x.shape[:-1], self.shape[0]
            )
        if count < fill:
            rows = nn.functional.pad(x.reshape(count, self.shape[1]), (0, 0, 0, fill - count))
            out = PACKED_PRODUCT(rows, stored, self.bias, "none", [], "")
            return out[:count].view(*x.shape[:-1], self.shape[0])
        return PACKED_PRODUCT(x.contiguous(), stored, self.bias, "none", [], "")

    def with_gradient(self, x: Tensor) -> Tensor:
        """The same with gradient to `x [..., in]`; needs the plain weight."""
        assert self.plain is not None
        flat = nn.functional.linear(x.reshape(-1, self.shape[1]), self.plain, self.bias)
        return flat.view(*x.shape[:-1], self.shape[0])

    @property
    def weight(self) -> Tensor:
        """The weight `[out, in]`; unpacked anew for every call where only the packed one is kept."""
        for storage in ("output", "input"):
            if storage in self.stored:
                return self.stored[storage]
        return self.stored["packed"].to_dense()


class Together:
    """Layers that read the same rows one after the other, as one product. The first that is asked computes all."""

    def __init__(self, products: Products, sizes: list[int]) -> None:
        self.products, self.sizes = products, sizes
        self.rows: Tensor | None = None  # held, so that no other tensor can be taken for it
        self.parts: list[Tensor | None] = []

    def part(self, i: int, x: Tensor) -> Tensor:
        if self.rows is not x or self.parts[i] is None:
            self.rows, self.parts = x, list(self.products(x).split(self.sizes, -1))
        found, self.parts[i] = self.parts[i], None
        if i == len(self.sizes) - 1:
            self.rows = None
        assert found is not None
        return found


class ArrangedLinear(nn.Linear):
    """A frozen linear layer, stored as its plan needs it, alone or as a part of a larger product; `weight` and the
    state dict give the weight as it was."""

    def __init__(self, layer: nn.Linear, together: Together, part: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        self.together, self.part, self.alone = together, part, len(together.sizes) == 1

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.together.products.weight.split(self.together.sizes)[self.part]

    def forward(self, x: Tensor) -> Tensor:
        return self.together.products(x) if self.alone else self.together.part(self.part, x)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.contiguous()

    def plain(self) -> nn.Linear:
        """The ordinary layer that it was."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight.contiguous(), requires_grad=False)
        layer.bias = self.bias
        return layer


# ---- whole networks ------------------------------------------------------------------------------------------------
# Layers of one module that always read the same rows, one after the other.
OF_TARGET = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
OF_DRAFTER = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))  # queries are of the block, keys of the context as well


def arrange(module: nn.Module, together: Sequence[tuple[str, ...]] = OF_TARGET) -> None:
    """Stores the weights of a frozen network's linear layers on a CPU as is best for few rows; in place."""
    groups = list(_groups(module, together))
    shapes = [(g[0].weight.shape[1], sum(len(layer.weight) for layer in g), g[0].weight.dtype) for _, _, g in groups]
    for (owner, names, layers), plan in zip(groups, planned(shapes), strict=True):
        if plan == PLAIN:
            continue
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        product = Together(Products(weight, bias, plan), [len(layer.weight) for layer in layers])
        for part, (name, layer) in enumerate(zip(names, layers, strict=True)):
            setattr(owner, name, ArrangedLinear(layer, product, part))


def restore(module: nn.Module) -> None:
    """Takes back what `arrange` did: packed weights cannot be compiled."""
    for owner in list(module.modules()):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, ArrangedLinear):
                setattr(owner, name, layer.plain())


def products_of(weight: Tensor, bias: Tensor | None) -> Products:
    """Products with one large weight that stays in memory as it is, such as an LM head's."""
    plan = planned([(weight.shape[1], weight.shape[0], weight.dtype)], weight.device)[0]
    return Products(weight.detach(), bias, plan, keep_plain=True)


def described(*modules: nn.Module | Products) -> dict[str, Any]:
    """For the record of a measurement: what is forced, the ways by shape, megabytes of second copies."""
    everything: dict[int, Products] = {}
    for module in modules:
        layers = [m for m in module.modules() if isinstance(m, ArrangedLinear)] if isinstance(module, nn.Module) else []
        found = [layer.together.products for layer in layers] if isinstance(module, nn.Module) else [module]
        everything |= {id(products): products for products in found}
    ways, extra = {}, 0
    for products in everything.values():
        out, in_ = products.shape
        steps = [f"from {n}: {way}" for n, way in zip(STEPS, products.plan, strict=True)]
        kept = [text for i, text in enumerate(steps) if i == 0 or products.plan[i] != products.plan[i - 1]]
        ways[f"{in_} to {out}"] = "; ".join(kept)
        copies = len(products.stored.keys() - {"output"}) if products.plain is not None else len(products.stored) - 1
        extra += copies * in_ * out * products.dtype.itemsize
    return {"forced": forced(), "ways": ways, "extra_megabytes": round(extra / 1e6)}


def _groups(
    module: nn.Module, together: Sequence[tuple[str, ...]]
) -> Iterable[tuple[nn.Module, tuple[str, ...], list[nn.Linear]]]:
    """(owner, names, layers) of the linear layers on the CPU that are worth it, those together that can be."""
    for owner in list(module.modules()):
        layers = {name: layer for name, layer in owner.named_children() if type(layer) is nn.Linear}
        while layers:
            first = next(iter(layers))
            names = next((group for group in together if group[0] == first), (first,))
            there = [layers[name] for name in names if name in layers]
            if len(there) < len(names) or len({(x.in_features, x.weight.dtype, x.bias is None) for x in there}) > 1:
                names, there = (first,), [layers[first]]
            for name in names:
                del layers[name]
            rows = sum(len(x.weight) for x in there)
            if _worth_it((rows, there[0].in_features), there[0].weight.dtype, there[0].weight.device):
                yield owner, names, there


def _worth_it(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> bool:
    possible = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16_units())  # oneDNN packs no other bf16
    return device.type == "cpu" and possible and math.prod(shape) >= SMALL


# ---- plans ---------------------------------------------------------------------------------------------------------
Shape = tuple[int, int, torch.dtype]  # in, out


def forced() -> str | None:
    """`plain` or `packed`, from the environment. Raises InputError for anything else."""
    value = os.environ.get(FORCED) or None
    if value not in (None, "plain", "packed"):
        raise InputError(f"{FORCED} must be plain or packed, or left out to take the fastest, got {value!r}.")
    return value


def planned(shapes: list[Shape], device: torch.device | str = "cpu") -> list[Plan]:
    """The plan of every shape; those that this machine has not timed yet are timed now."""
    if forced() == "plain" or torch.device(device).type != "cpu":
        return [PLAIN] * len(shapes)
    worth = {s for s in shapes if _worth_it(s[:2], s[2], torch.device("cpu"))}
    if PACKED_PRODUCT is None:
        if forced():
            raise InputError(f"{FORCED}=packed needs a torch with oneDNN, and this one has none.")
        return [PLAIN] * len(shapes)
    if forced():
        return [PACKED_ALWAYS if s in worth else PLAIN for s in shapes]
    known = _remembered()
    if unknown := sorted(worth - known.keys(), key=str):
        known |= measured(unknown)
        _remember(known)
    return [known.get(s, PLAIN) for s in shapes]


def measured(shapes: list[Shape]) -> dict[Shape, Plan]:
    """Times every way for every shape, and chooses."""
    share = BUDGET / len(shapes)
    return {shape: chosen(seconds_of(shape, share)) for shape in shapes}


def ways(step: int, dtype: torch.dtype) -> list[Way]:
    """The candidates for a number of rows."""
    plain = [OUTPUT, INPUT] if dtype == torch.float32 else [OUTPUT]
    return [*plain, PACKED, *([Way("packed", 4)] if TIMED[step] < 4 else [])]


def seconds_of(shape: Shape, budget: float) -> list[dict[Way, float]]:
    """Seconds of every candidate for each of TIMED, the least of as many passes as fit into so many seconds."""
    in_, out, dtype = shape
    out = min(out, max(1, COLD // (in_ * dtype.itemsize)))
    copies = max(1, min(64, COLD // (in_ * out * dtype.itemsize)))
    candidates = [(step, way) for step in range(len(STEPS)) for way in ways(step, dtype)]
    storages = dict.fromkeys(way.storage for _, way in candidates)
    found = [dict[Way, float]() for _ in STEPS]
    for storage in storages:  # one after the other, so that the copies of one are all that lies in memory
        stored = [_store(torch.ones(out, in_, dtype=dtype), storage) for _ in range(copies)]
        deadline, passes = time.perf_counter() + budget / len(storages), 0
        while not passes or time.perf_counter() < deadline:
            for step, way in candidates:
                if way.storage == storage:
                    x = torch.ones(max(TIMED[step], way.fill), in_, dtype=dtype)
                    found[step][way] = min(found[step].get(way, math.inf), _seconds(x, stored, storage == "packed"))
            passes += 1
    return found


def _seconds(x: Tensor, stored: list[Tensor], packed: bool) -> float:
    began = time.perf_counter()
    for weight in stored:
        if packed:
            PACKED_PRODUCT(x, weight, None, "none", [], "")
        else:
            nn.functional.linear(x, weight)
    return (time.perf_counter() - began) / len(stored)


def chosen(seconds: list[dict[Way, float]]) -> Plan:
    """The best way for each number of rows out of one storage; out of two where that is clearly faster."""
    storages = sorted({way.storage for found in seconds for way in found})
    options = []
    for size in (1, 2):
        for kept in combinations(storages, size):
            best = [min((w for w in found if w.storage in kept), key=found.__getitem__) for found in seconds]
            score = sum(s * found[way] for s, found, way in zip(SCORED, seconds, best, strict=True))
            options.append((score if size == 1 else score / SECOND_COPY, best))
    return tuple(min(options, key=lambda option: option[0])[1])  # type: ignore[return-value]


# ---- what this machine has timed -------------------------------------------------------------------------------------
def _file() -> Any:
    from .embedded import cache_root

    return cache_root() / "weights.json"


def _machine() -> str:
    """What timings depend on."""
    isa = [os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")]
    known = (cpu_name(), torch.backends.cpu.get_cpu_capability(), *isa, torch.__version__, torch.get_num_threads())
    return " | ".join(map(str, known))


def _remembered() -> dict[Shape, Plan]:
    try:
        kept = json.loads(_file().read_text())[_machine()]
        return {
            (int(i), int(o), getattr(torch, dtype)): tuple(Way(*way) for way in plan)  # type: ignore[misc]
            for (i, o, dtype), plan in ((name.split(), plan) for name, plan in kept.items())
            if len(plan) == len(STEPS)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(plans: dict[Shape, Plan]) -> None:
    """Best effort: without a cache folder every process times for itself."""
    mine = {
        f"{i} {o} {str(dtype).removeprefix('torch.')}": list(map(list, plan)) for (i, o, dtype), plan in plans.items()
    }
    try:
        path = _file()
        try:
            before = json.loads(path.read_text())
        except (OSError, ValueError):
            before = None
        everything = before if isinstance(before, dict) else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({**everything, _machine(): mine}, indent=1) + "\n")
    except OSError:
        pass


# ---- storages ------------------------------------------------------------------------------------------------------
def _store(weight: Tensor, storage: str) -> Tensor:
    if storage == "packed":
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return weight.t().contiguous().t() if storage == "input" else weight.contiguous()
