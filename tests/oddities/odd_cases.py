"""Small trainings, each with something unusual in its state: what is captured, and what one step does."""

import contextlib

import torch
from torch.nn.utils import parametrizations, parametrize

FLOATS_OF_8_BITS = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


class Case:
    """``state`` is what the engine is given; ``step`` trains once; ``is_right`` looks at what no value shows."""

    def __init__(self):
        self.state = {}

    def step(self, number):
        raise NotImplementedError

    def prepare(self, resumed_step):
        """What the program does before a restore, once it knows how far it had come."""

    def is_right(self):
        return True

    def learn(self, optimizer, loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Tied(Case):
    """A head tied to its embedding, a buffer under two names, plain tensors that are one, a shared learning rate."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed = torch.nn.Embedding(11, 6)
        self.model.head = torch.nn.Linear(6, 11, bias=False)
        self.model.head.weight = self.model.embed.weight
        self.model.register_buffer("seen", torch.zeros(11))
        self.model.register_buffer("counted", self.model.seen)
        self.model.other = torch.nn.Parameter(torch.ones(3))
        rate = torch.tensor(1e-2)
        groups = [{"params": [self.model.embed.weight]}, {"params": [self.model.other]}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, capturable=False, foreach=False)
        total = torch.zeros(4)
        self.loose = {"total": total, "same": total}
        self.state = {"model": self.model, "optimizer": self.optimizer, "loose": self.loose}

    def step(self, number):
        tokens = torch.randint(0, 11, (8,))
        loss = torch.nn.functional.cross_entropy(self.model.head(self.model.embed(tokens)), tokens)
        loss = loss + self.model.other.square().sum()
        self.learn(self.optimizer, loss)
        self.model.seen += 1
        # Through one name only: what was one tensor and came back as two would differ from here on.
        self.loose["total"] += loss.detach()
        self.optimizer.param_groups[0]["lr"].mul_(0.9)

    def is_right(self):
        groups = self.optimizer.param_groups
        return (
            self.model.head.weight is self.model.embed.weight
            and self.model.seen is self.model.counted
            and self.loose["same"].data_ptr() == self.loose["total"].data_ptr()
            and groups[0]["lr"].data_ptr() == groups[1]["lr"].data_ptr()
        )


class Shapes(Case):
    """No elements, no dimensions, and neither of both."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.scalar = torch.nn.Parameter(torch.randn(()))
        self.model.empty = torch.nn.Parameter(torch.randn(0, 3))
        self.model.also_empty = torch.nn.Parameter(torch.randn(0, 3))
        self.model.one = torch.nn.Parameter(torch.randn(1))
        for dtype in (torch.complex32, torch.complex128, torch.float8_e4m3fnuz, torch.bool, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            self.model.register_buffer(f"{name}_scalar", torch.ones(()).to(dtype))
            self.model.register_buffer(f"{name}_empty", torch.ones(0, 2).to(dtype))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer, "queue": {"items": torch.zeros(0, 4)}}

    def step(self, number):
        loss = (self.model.scalar * torch.randn(()) + self.model.one.sum() + self.model.empty.sum()).square()
        self.learn(self.optimizer, loss)
        self.state["queue"]["items"] = torch.randn(number % 3, 4)
        self.model.complex128_scalar.mul_(1 + 0.5j)


class Strides(Case):
    """Fused AdamW walks memory: a moment in another order of dimensions than its parameter trains something else."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.Conv2d(5, 4, 2))
        self.model.to(memory_format=torch.channels_last)
        self.model.turned = torch.nn.Parameter(torch.randn(6, 4).t())
        self.model.strided = torch.nn.Parameter(torch.randn(8, 6)[::2, ::3])
        base = torch.randn(12)
        self.model.register_buffer("expanded", torch.zeros(1, 3).expand(4, 3))
        self.model.register_buffer("windows", base.unfold(0, 4, 2))
        self.model.register_buffer("under", base)
        self.model.register_buffer("part", self.model.turned.detach()[1:3])
        self.fused = torch.optim.AdamW(self.model[:2].parameters(), lr=1e-2, fused=True)
        last = [*self.model[2].parameters(), self.model.turned, self.model.strided]
        self.momentum = torch.optim.SGD(last, lr=1e-2, momentum=0.9, foreach=True)
        self.state = {"model": self.model, "fused": self.fused, "momentum": self.momentum}

    def step(self, number):
        out = self.model(torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last))
        loss = out.square().mean() + (self.model.turned @ torch.randn(6)).square().sum()
        loss = loss + (self.model.strided - 1).square().sum()
        loss.backward()
        self.fused.step()
        self.momentum.step()
        self.model.zero_grad()
        self.model.expanded[:1] += out.detach().mean()
        self.model.under += 1

    def is_right(self):
        convolution, moments = self.model[0].weight, self.fused.state[self.model[0].weight]
        return (
            convolution.is_contiguous(memory_format=torch.channels_last)
            and moments["exp_avg"].stride() == convolution.stride()
            and self.model.turned.stride() == (1, 4)
            and self.model.strided.stride() == (12, 3)
            and self.model.expanded.stride() == (0, 1)
            and self.model.windows.data_ptr() == self.model.under.data_ptr()
            and self.model.part.data_ptr() == self.model.turned[1:].data_ptr()
        )


class Dtypes(Case):
    """Trained in bf16, float16, float64 and complex; buffers of every dtype that torch can fill."""

    whole = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128):
            self.model.register_parameter(
                f"p_{dtype}".replace("torch.", ""), torch.nn.Parameter(torch.randn(5, 3).to(dtype))
            )
        self.model.turned = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.complex64).t())
        self.model.register_buffer("conjugate", torch.randn(3, 5, dtype=torch.complex128).conj())
        for dtype in (*self.whole, *FLOATS_OF_8_BITS, torch.complex32, torch.bool):
            self.model.register_buffer(f"b_{dtype}".replace("torch.", ""), torch.zeros(7, 3).to(dtype))
        if hasattr(torch, "float4_e2m1fn_x2"):
            self.model.register_buffer("b4", torch.zeros(7, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
        self.model.register_buffer("turned8", torch.zeros(4, 6).to(torch.float8_e4m3fn).t())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number):
        losses = [(parameter * parameter.conj()).abs().double().sum() for parameter in self.model.parameters()]
        self.learn(self.optimizer, sum(losses))
        for buffer in self.model.buffers():
            fresh = torch.randint(0, 255, (buffer.numel() * buffer.element_size(),), dtype=torch.uint8)
            if buffer.dtype is torch.bool:
                fresh = fresh % 2
            # Every pattern of bits, NaNs among them.
            buffer.copy_(fresh.view(buffer.dtype).view(buffer.shape))


class Adversaries(Case):
    """Two optimizers in turns, a third that never steps, a fourth that first steps at step 5; momentum from step 1."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        self.spare, self.late = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.state = {
            "maker": self.maker,
            "judge": self.judge,
            "spare": self.spare,
            "late": self.late,
            "makes": torch.optim.Adam(self.maker.parameters(), lr=1e-2),
            "judges": torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9),
            "never": torch.optim.AdamW(self.spare.parameters(), lr=1e-2),
            "lately": torch.optim.RMSprop(self.late.parameters(), lr=1e-2, momentum=0.5),
        }

    def step(self, number):
        made = self.maker(torch.randn(8, 3))
        judges = number % 2
        loss = self.judge(made.detach() if judges else made).square().mean()
        self.learn(self.state["judges" if judges else "makes"], loss)
        self.state["makes" if judges else "judges"].zero_grad()
        if number >= 5:
            self.learn(self.state["lately"], self.late(torch.randn(4, 2)).square().mean())


class Thawed(Case):
    """A frozen backbone that is trained from step 4 on, in a group of its own."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(600, 600).requires_grad_(False)
        self.head = torch.nn.Linear(600, 2)
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=1e-2, momentum=0.9)
        self.state = {"backbone": self.backbone, "head": self.head, "optimizer": self.optimizer}

    def thaw(self):
        self.backbone.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.backbone.parameters()), "lr": 1e-3})

    def prepare(self, resumed_step):
        if resumed_step >= 4:
            self.thaw()

    def step(self, number):
        if number == 4:
            self.thaw()
        self.learn(self.optimizer, self.head(self.backbone(torch.randn(4, 600))).square().mean())


class Compiled(Case):
    """As a whole, in a part, and in place; by a backend that needs no compiler."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.inner[0] = torch.compile(self.inner[0], backend="eager")
        self.model = torch.compile(self.inner, backend="eager")
        self.other = torch.nn.Linear(4, 4)
        self.other.compile(backend="aot_eager")
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.other.parameters()], lr=1e-2)
        self.state = {"model": self.model, "other": self.other, "optimizer": self.optimizer}

    def step(self, number):
        self.learn(self.optimizer, self.other(self.model(torch.randn(6, 4))).square().mean())


class Uncompiled(Compiled):
    """The same without."""

    def __init__(self):
        Case.__init__(self)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.other = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.other.parameters()], lr=1e-2)
        self.state = {"model": self.model, "other": self.other, "optimizer": self.optimizer}


class Parametrized(Case):
    """Weights that are worked out of others; spectral_norm goes on with its buffers in every forward."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(
            parametrizations.weight_norm(torch.nn.Linear(5, 5)),
            parametrizations.spectral_norm(torch.nn.Linear(5, 5)),
            parametrizations.orthogonal(torch.nn.Linear(5, 5)),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number):
        with parametrize.cached() if number % 2 else contextlib.nullcontext():
            batch = torch.randn(4, 5)
            loss = self.model(batch).square().mean() + self.model(-batch).sum()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Tagged(torch.Tensor):
    """A subclass with memory like any other tensor's."""


class Versioned(torch.nn.Module):
    """Has another format of its state since version 2, as many of torch's own modules have."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def _load_from_state_dict(self, state_dict, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"] * 1000
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


class Lazily(Case):
    """Modules that learn their shape from the first batch; nn.Buffer; a subclass with memory; versions of formats."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d(), Versioned())
        self.model.add_module("marks", torch.nn.Module())
        buffer = getattr(torch.nn, "Buffer", None)
        self.model.marks.kept = torch.zeros(2) if buffer is None else buffer(torch.zeros(2))
        self.model.marks.tagged = torch.nn.Parameter(torch.randn(3).as_subclass(Tagged))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number):
        out = self.model[1](self.model[0](torch.randn(6, 5)))
        tagged = self.model.marks.tagged.as_subclass(torch.Tensor)
        self.learn(self.optimizer, out.square().mean() + (out.mean() * tagged).square().sum() + self.model[2].scale[0])
        self.model[2].scale += out.detach().mean()
        self.model.marks.kept += 1

    def is_right(self):
        return type(self.model.marks.tagged.detach()) is Tagged


class Born(Case):
    """Built on the meta device, given memory and values afterwards, then a state that is restored."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def prepare(self, resumed_step):
        # Parameters stay the same objects for the optimizer only if they are swapped.
        self.model.to_empty(device="cpu")
        for module in self.model:
            module.reset_parameters()
        self.optimizer.param_groups[0]["params"] = list(self.model.parameters())

    def step(self, number):
        self.learn(self.optimizer, self.model(torch.randn(4, 5)).square().mean())


KINDS = (Tied, Shapes, Strides, Dtypes, Adversaries, Thawed, Compiled, Uncompiled, Parametrized, Lazily, Born)


class All(Case):
    """All of them in one training; the names in its state begin with theirs."""

    def __init__(self):
        super().__init__()
        self.cases = [kind() for kind in KINDS]
        for case in self.cases:
            for name, part in case.state.items():
                self.state[f"{type(case).__name__}_{name}"] = part

    def step(self, number):
        for case in self.cases:
            case.step(number)

    def prepare(self, resumed_step):
        for case in self.cases:
            case.prepare(resumed_step)

    def is_right(self):
        return all(case.is_right() for case in self.cases)


CASES = {kind.__name__: kind for kind in (All, Compiled, Uncompiled)}
