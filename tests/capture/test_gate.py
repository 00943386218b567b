"""Every way an optimizer steps passes the gate before it changes anything, after forward and backward."""

import gc
import weakref

import pytest
import torch

from lazysnap.capture.gate import OptimizerGates


class Journal:
    def __init__(self, optimizer, parameter):
        self.events = []
        self.parameter = parameter
        self.disturbed = False
        self.start = parameter.detach().clone()
        self.gates = OptimizerGates(self.gate, lambda: self.disturbed, lambda: self.events.append("late"))
        self.gates.install([optimizer])

    def gate(self):
        self.events.append("gate" if torch.equal(self.parameter, self.start) else "gate after change")

    def closure(self):
        self.events.append("forward")
        loss = (self.parameter**2).sum()
        self.parameter.grad = None
        loss.backward()
        return loss


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, max_iter=3)


MAKERS = [adam, fused, sgd, lbfgs]


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_with_a_closure_the_gate_comes_after_forward_and_backward(make, how, parameter):
    optimizer = make([parameter])
    journal = Journal(optimizer, parameter)

    loss = optimizer.step(journal.closure) if how == "positional" else optimizer.step(closure=journal.closure)

    assert journal.events[:2] == ["forward", "gate"]
    assert torch.is_tensor(loss)
    assert not torch.equal(parameter, journal.start)


@pytest.mark.parametrize("make", MAKERS[:3])
def test_without_a_closure_the_gate_comes_first(make, parameter):
    optimizer = make([parameter])
    journal = Journal(optimizer, parameter)
    journal.closure()

    optimizer.step()

    assert journal.events == ["forward", "gate", "late"]


@pytest.mark.parametrize("make", [adam, sgd])
def test_the_wrapped_closure_does_not_change_the_result(make):
    results = []
    for gated in (False, True):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = make([parameter])
        journal = Journal(optimizer, parameter)
        if not gated:
            journal.gates.remove()
        for _ in range(3):
            optimizer.step(journal.closure)
        results.append(parameter.detach())

    assert torch.equal(*results)


class Sharpness(torch.optim.SGD):
    """Like SAM: it climbs before it calls the closure."""

    def step(self, closure):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.1)
        with torch.enable_grad():
            closure()
        return super().step()


def test_an_optimizer_that_changes_weights_before_its_closure_is_gated_early_from_then_on(parameter):
    optimizer = Sharpness([parameter], lr=0.1)
    journal = Journal(optimizer, parameter)

    journal.disturbed = True
    optimizer.step(journal.closure)
    journal.disturbed = False
    journal.events.clear()
    journal.start = parameter.detach().clone()
    optimizer.step(journal.closure)

    assert journal.events[0] == "gate"


@pytest.mark.parametrize("overflow", [False, True])
def test_a_grad_scaler_steps_or_skips_as_without_us(overflow, parameter):
    optimizer = adam([parameter])
    journal = Journal(optimizer, parameter)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((parameter**2).sum()).backward()
    if overflow:
        parameter.grad[0] = float("inf")

    scaler.step(optimizer)
    scaler.update()

    assert journal.events == ([] if overflow else ["gate", "late"])
    assert torch.equal(parameter, journal.start) is overflow


def test_nothing_is_left_after_removal(parameter):
    optimizer = adam([parameter])
    journal = Journal(optimizer, parameter)
    journal.gates.remove()
    journal.closure()

    optimizer.step()

    assert journal.events == ["forward"]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_installing_again_adds_nothing_and_a_replaced_optimizer_is_let_go(parameter):
    first, second = adam([parameter]), sgd([parameter])
    journal = Journal(first, parameter)
    journal.gates.install([first])
    assert len(first._optimizer_step_pre_hooks) == 1

    journal.gates.install([second])

    assert not first._optimizer_step_pre_hooks
    assert len(second._optimizer_step_pre_hooks) == 1


@pytest.mark.slow
def test_the_gate_does_not_keep_an_optimizer_alive(parameter):
    optimizer = adam([parameter])
    journal = Journal(optimizer, parameter)
    alive = weakref.ref(optimizer)

    del optimizer
    gc.collect()

    assert alive() is None
    journal.gates.remove()
