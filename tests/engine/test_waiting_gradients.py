"""A restart never loses gradients that an optimizer accumulates over several boundaries."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazysnap import SnapshotConfig, SnapshotEngine
from lazysnap.capture.gradients import WaitingGradients
from lazysnap.state.objects import ObjectState

STEPS = 12
LEFT_OUT = "gradients waited for an optimizer step"


class Accumulating:
    """One optimizer; a boundary at each micro-batch, a step at every fourth."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, 4)})
        self.optimizers = {"all": torch.optim.Adam(self.model.parameters(), 1e-2)}

    def state(self):
        return {"model": self.model, **self.optimizers}

    def train(self, step):
        self._loss(step).backward()
        if step % 4 == 0:
            self.optimizers["all"].step()
            self.optimizers["all"].zero_grad()

    def _loss(self, step):
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        return self.model["second"](self.model["first"](batch)).square().mean()


class ClearedInPlace(Accumulating):
    """``zero_grad(set_to_none=False)`` behind the step of every micro-batch."""

    def train(self, step):
        self._loss(step).backward()
        self.optimizers["all"].step()
        self.optimizers["all"].zero_grad(set_to_none=False)


class ClearedBefore(Accumulating):
    """``zero_grad`` before the backward: the used gradients still stand at the boundary."""

    def train(self, step):
        self.optimizers["all"].zero_grad()
        self._loss(step).backward()
        self.optimizers["all"].step()


class TwoOptimizers(Accumulating):
    """One steps at each boundary, the other at every fourth."""

    def __init__(self):
        super().__init__()
        self.optimizers = {name: torch.optim.Adam(part.parameters(), 1e-2) for name, part in self.model.items()}

    def train(self, step):
        self.optimizers["first"].zero_grad()
        self._loss(step).backward()
        self.optimizers["first"].step()
        if step % 4 == 0:
            self.optimizers["second"].step()
            self.optimizers["second"].zero_grad()


class Adversarial(TwoOptimizers):
    """The loss of each optimizer leaves gradients in the other, which clears them before its own backward."""

    def train(self, step):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
            self._loss(step).backward()
            optimizer.step()


class AdversarialInPlace(TwoOptimizers):
    """The same with ``zero_grad(set_to_none=False)``: each gradient stays the same tensor."""

    def train(self, step):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=False)
            self._loss(step).backward()
            optimizer.step()


class AccumulatingInPlace(Accumulating):
    """``zero_grad(set_to_none=False)`` behind the step of every fourth micro-batch."""

    def train(self, step):
        self._loss(step).backward()
        if step % 4 == 0:
            self.optimizers["all"].step()
            self.optimizers["all"].zero_grad(set_to_none=False)


class ClearedByHand(Accumulating):
    """Gradients are set to zero in place without the optimizer."""

    def train(self, step):
        self._loss(step).backward()
        self.optimizers["all"].step()
        self.model.zero_grad(set_to_none=False)


class AdversarialInBuckets(TwoOptimizers):
    """Under DDP each gradient is always the same view into a bucket, also after ``zero_grad()``."""

    def __init__(self):
        super().__init__()
        self.wrapped = {
            name: torch.nn.parallel.DistributedDataParallel(part, gradient_as_bucket_view=True)
            for name, part in self.model.items()
        }

    def train(self, step):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
            self._loss(step).backward()
            optimizer.step()

    def _loss(self, step):
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        return self.wrapped["second"](self.wrapped["first"](batch)).square().mean()


@pytest.fixture(autouse=True)
def one_process_group(tmp_path):
    """DDP of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class ValuesRead(TorchDispatchMode):
    """Counts how often a value of a tensor is handed to Python: on a device each of them waits for all its work."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def run(training, engine, first, last):
    for step in range(first, last + 1):
        training.train(step)
        if engine is not None:
            engine.boundary(step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "eligible", "says"),
    [
        (Accumulating, [4, 8], True),
        (TwoOptimizers, [4, 8], True),
        (Adversarial, list(range(2, 11)), False),
        (ClearedInPlace, list(range(1, 11)), False),
        (ClearedBefore, list(range(1, 11)), False),
        (AdversarialInPlace, list(range(2, 11)), False),
        (AccumulatingInPlace, [4, 8], True),
        (ClearedByHand, list(range(1, 11)), False),
        (AdversarialInBuckets, list(range(2, 11)), False),
    ],
)
def test_a_boundary_with_gradients_that_wait_is_not_captured(kind, eligible, says, tmp_path, caplog):
    """The restart is exact; gradients that are cleared unused hold up nothing; it is said once.

    No value is read, except where the values alone tell.
    """
    undisturbed = kind()
    run(undisturbed, None, 1, STEPS)
    training = kind()
    engine = SnapshotEngine(SnapshotConfig(job_id=str(tmp_path)), training.state())
    assert engine.restore("latest") is None
    reads = ValuesRead()
    for step in range(1, 11):
        training.train(step)
        with reads:
            engine.boundary(step)
    assert (reads.count > 0) == (kind is ClearedByHand)
    left_out = engine.statistics().skipped[LEFT_OUT]
    engine.abandon()
    again = kind()
    engine = SnapshotEngine(SnapshotConfig(job_id=str(tmp_path)), again.state())
    try:
        snapshot = engine.restore("latest")
        run(again, engine, snapshot.step + 1, STEPS)
    finally:
        engine.close(drain=False)

    assert left_out == 10 - len(eligible)
    assert snapshot.step in eligible
    for name, weight in undisturbed.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name]), name
    lines = [record.message for record in caplog.records if "holds no gradients" in record.message]
    assert len(lines) == (2 if says else 0)  # of each engine one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "expected"),
    [((4, 12), [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]), ((8, 12), [1, 2, 3, 4, 5, 6, 7, 9, 10, 11])],
    ids=["in the second round", "in the first round"],
)
def test_an_optimizer_whose_accumulated_gradients_were_dropped_once_is_still_waited_for(steps, expected, tmp_path):
    """As ``GradScaler`` does after an overflow."""
    training = Accumulating()
    optimizer = training.optimizers["all"]
    engine = SnapshotEngine(SnapshotConfig(job_id=str(tmp_path)), training.state())
    left_out = []
    try:
        engine.restore("latest")
        for step in range(1, 13):
            if step % 4 == 1:
                optimizer.zero_grad()
            training._loss(step).backward()
            if step in steps:
                optimizer.step()
            before = engine.statistics().skipped[LEFT_OUT]
            engine.boundary(step)
            if engine.statistics().skipped[LEFT_OUT] > before:
                left_out.append(step)
    finally:
        engine.close(drain=False)
    assert left_out == expected


class SeldomClearing(torch.optim.Adam):
    """Its ``zero_grad`` is called at each micro-batch, and clears only behind a step."""

    has_stepped = False

    def step(self, *args, **kwargs):
        self.has_stepped = True
        return super().step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        if self.has_stepped:
            super().zero_grad(*args, **kwargs)
        self.has_stepped = False


@pytest.mark.slow
def test_a_zero_grad_that_clears_nothing_leaves_gradients_that_wait(tmp_path):
    training = Accumulating()
    optimizer = SeldomClearing(training.model.parameters(), 1e-2)
    state = {"model": training.model, "all": optimizer}
    engine = SnapshotEngine(SnapshotConfig(job_id=str(tmp_path)), state)
    try:
        engine.restore("latest")
        for step in range(1, 9):
            training._loss(step).backward()
            if step % 4 == 0:
                optimizer.step()
            optimizer.zero_grad()
            engine.boundary(step)
        assert engine.statistics().skipped[LEFT_OUT] == 6
    finally:
        engine.close(drain=False)


@pytest.mark.slow
def test_the_hook_on_zero_grad_disturbs_nobody_and_goes_with_the_engine(tmp_path):
    training = Accumulating()
    optimizer = training.optimizers["all"]
    before = inspect.signature(optimizer.zero_grad)
    engine = SnapshotEngine(SnapshotConfig(job_id=str(tmp_path)), training.state())
    try:
        engine.restore("latest")
        engine.boundary(1)
        assert inspect.signature(optimizer.zero_grad) == before
        copied = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
        assert "zero_grad" not in vars(copied)
        training._loss(1).backward()
        torch.compile(optimizer.zero_grad, backend="eager")(set_to_none=False)
        assert all(not one.grad.any() for one in training.model.parameters())
    finally:
        engine.close(drain=False)
    assert "zero_grad" not in vars(optimizer)


def test_the_hook_on_zero_grad_keeps_no_optimizer_alive():
    """Its state may fill a device, and the garbage collector comes late."""
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 1e-2)
    hook = WaitingGradients().watch_clearing(optimizer)
    optimizer.zero_grad()
    gc.disable()
    try:
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    hook.remove()


@pytest.mark.slow
def test_in_a_loop_that_asks_for_no_restart_used_gradients_do_not_wait(tmp_path):
    training = ClearedBefore()
    engine = SnapshotEngine(SnapshotConfig(job_id=str(tmp_path)), training.state())
    try:
        run(training, engine, 1, 3)
        assert engine.statistics().skipped[LEFT_OUT] == 0
    finally:
        engine.close(drain=False)


def test_the_last_step_is_captured_with_a_warning(tmp_path, caplog):
    """Weights of the end of a training are worth more than its gradients; the line names the optimizer."""
    training = Accumulating()
    engine = SnapshotEngine(tmp_path / "runs", training.state())
    engine.restore("latest")
    run(training, engine, 1, 6)

    assert engine.close()

    assert "step 6 is captured without the gradients of all" in caplog.text
    fresh = Accumulating()
    engine = SnapshotEngine(tmp_path / "runs", fresh.state())
    try:
        assert engine.restore("latest").step == 6
    finally:
        engine.close(drain=False)


@pytest.mark.slow
def test_gradients_that_are_never_used_hold_up_captures_for_a_while_only(tmp_path, caplog):
    """An optimizer that steps no more does not leave the training without snapshots."""
    training = TwoOptimizers()
    training.model["second"].weight.grad = torch.ones(4, 4)
    engine = SnapshotEngine(SnapshotConfig(job_id=str(tmp_path)), training.state())
    try:
        engine.restore("latest")
        captured = []
        for step in range(1, 80):
            training.optimizers["first"].zero_grad()
            training._loss(step).backward()
            training.optimizers["first"].step()
            if engine.boundary(step):
                captured.append(step)
    finally:
        engine.close(drain=False)
    assert captured[0] == 65
    assert "is captured without the gradients of second" in caplog.text


class Replaceable(ObjectState):
    """A state whose optimizer the program may replace, as Lightning's may."""

    def named(self):
        return dict(self._objects)

    def replace(self, optimizer):
        self._objects["all"] = optimizer


def test_an_optimizer_that_replaces_another_one_is_waited_for_from_its_first_boundary(tmp_path):
    training = ClearedBefore()  # its used gradients still stand at each boundary
    state = Replaceable(training.state())
    engine = SnapshotEngine(SnapshotConfig(job_id=str(tmp_path)), state)
    try:
        run(training, engine, 1, 3)
        training.optimizers["all"] = torch.optim.SGD(training.model.parameters(), 1e-2)
        state.replace(training.optimizers["all"])
        run(training, engine, 4, 6)
        assert engine.statistics().skipped[LEFT_OUT] == 0
    finally:
        engine.close(drain=False)
