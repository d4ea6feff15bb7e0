"""The runner on one process: what it accepts, computes again and refuses, and how near the gradients are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from surefoot.core.errors import SurefootError
from surefoot.model.loss import loss_of
from surefoot.parallel.exact import ExactRunner, ExactSums, NextUnits, Seen, Uses, next_units
from surefoot.parallel.running import Sequential
from surefoot.tensors.batch import IGNORED_LABEL, Batch
from surefoot.tensors.grid import LOWEST_EXPONENT
from surefoot.tensors.world import single_world

CPU = torch.device("cpu")
VOCAB_SIZE = 12


class Model(nn.Module):
    """Tied and read outside of its module, with a one-element and an unused parameter, a buffer that each forward changes, and dropout."""

    num_forwards: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, 6)
        self.inner = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.temperature = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        x_BSD = self.embed(tokens_BS)
        x_BSD = x_BSD + self.drop(torch.tanh(self.inner(x_BSD)))
        return nn.functional.linear(x_BSD, self.embed.weight) * self.temperature * self.frozen


def atom(index: int, *, live: bool = True) -> Batch:
    tokens_BS = torch.randint(0, VOCAB_SIZE, (2, 5), generator=torch.Generator().manual_seed(index))
    labels_BS = tokens_BS.roll(-1, dims=1) if live else torch.full_like(tokens_BS, IGNORED_LABEL)
    return Batch(tokens_BS, labels_BS, torch.arange(5).expand(2, 5), torch.zeros_like(tokens_BS), torch.arange(2), 10 * live, atom=index)


def start(atom: Batch) -> None:
    torch.manual_seed(atom.atom)


def made(model: nn.Module) -> tuple[ExactRunner, ExactSums]:
    uses = Uses(model)
    sums = ExactSums(list(uses.cells), num_elements=uses.num_elements)
    inner = Sequential(model, CPU, nullcontext())
    return ExactRunner(inner, module=model, roots=[], uses=uses, sums=sums, world=single_world()), sums


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def reference(atoms: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """The float64 sums of each atom's float32 gradients."""
    totals: dict[str, torch.Tensor] = {}
    for one in atoms:
        model = model_of()
        start(one)
        torch.autograd.backward(loss_of(model(one.tokens_BS, one.positions_BS, one.doc_ids_BS), one).objective)
        for name, gradient in gradients(model).items():
            totals[name] = totals.get(name, torch.zeros_like(gradient, dtype=torch.float64)) + gradient
    return totals


def test_names_and_state_are_those_of_the_plain_model_and_only_a_forward_reads_uses() -> None:
    plain, model = model_of(), model_of()
    runner, _ = made(model)
    assert isinstance(model, Model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model.embed.weight, nn.Parameter)
    runner.run([atom(0)], start=start, loss=loss_of)
    assert isinstance(model.embed.weight, nn.Parameter)
    assert model.embed.weight is dict(model.named_parameters())["embed.weight"]


def test_gradients_are_within_1e_7_of_a_float64_sum_and_have_one_value_for_every_order() -> None:
    atoms = [atom(index) for index in range(9)]
    wanted = reference(atoms)
    found: list[dict[str, torch.Tensor]] = []
    for order in (atoms, atoms[::-1], atoms[4:] + atoms[:4]):
        model = model_of()
        runner, _ = made(model)
        totals: list[torch.Tensor] = []
        runner.watch_totals(totals.extend)
        runner.run(order, start=start, loss=loss_of)
        names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        found.append(dict(zip(names, totals, strict=True)))
        for name, gradient in gradients(model).items():
            assert torch.dist(gradient.double(), wanted[name]) <= 1e-7 * torch.linalg.vector_norm(wanted[name])
    assert {*found[0]} == {"temperature", "embed.weight", "inner.weight", "inner.bias"}
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_the_loss_has_one_value_for_every_order() -> None:
    atoms = [atom(index) for index in range(9)]
    model = model_of()
    runner, _ = made(model)
    one = runner.run(atoms, start=start, loss=loss_of)
    assert one.dtype == torch.float64
    assert runner.run(atoms[::-1], start=start, loss=loss_of) == one
    model.eval()
    assert runner.evaluate(atoms, loss=loss_of) == runner.evaluate(atoms[::-1], loss=loss_of)


def test_a_first_step_is_measured_and_computed_from_the_same_state() -> None:
    """Two passes: streams start anew, and the buffers that the first changed are put back."""
    model = model_of()
    runner, sums = made(model)
    assert set(sums.exponents.values()) == {None}
    started: list[int] = []

    def note(one: Batch) -> None:
        started.append(one.atom)
        start(one)

    runner.run([atom(0), atom(1)], start=note, loss=loss_of)
    assert started == [0, 1, 0, 1]
    assert int(model.num_forwards) == 2
    assert not sums.take_redos()
    assert {name for name, exponent in sums.exponents.items() if exponent is None} == {"unused"}
    assert sums.bound.largest == max(float(gradient.abs().max()) for gradient in gradients(model).values())
    runner.run([atom(0), atom(1)], start=note, loss=loss_of)
    assert len(started) == 6  # the units are known now


def test_units_go_through_a_checkpoint_and_a_state_without_any_begins_anew() -> None:
    runner, sums = made(model_of())
    runner.run([atom(0)], start=start, loss=loss_of)
    _, other = made(model_of())
    other.load_state_dict(sums.state_dict())
    assert other.exponents == sums.exponents
    other.load_state_dict({})
    assert set(other.exponents.values()) == {None}


def test_an_overflow_is_computed_again_and_told_once() -> None:
    model = model_of()
    runner, sums = made(model)
    runner.run([atom(0), atom(1)], start=start, loss=loss_of)
    good = dict(sums.exponents)
    for parameter in model.parameters():
        parameter.grad = None
    sums.load_state_dict({"exponents": good | {"inner.weight": LOWEST_EXPONENT}})
    runner.run([atom(0), atom(1)], start=start, loss=loss_of)
    (redo,) = sums.take_redos()
    assert "inner.weight grew past its grid: 2 addends" in redo.reason
    assert sums.take_redos() == []
    assert sums.exponents == good
    assert int(model.num_forwards) == 4  # of 8 forwards, those of accepted passes


def test_a_gradient_that_never_fits_is_an_error_by_name() -> None:
    """A model whose gradients grow from one pass to the next although atoms and streams are the same."""
    model = model_of()
    runner, _ = made(model)
    grown = iter(10.0 ** (9 * power) for power in range(4))

    def growing(one: Batch) -> None:
        start(one)
        model.frozen.data.fill_(next(grown))

    with pytest.raises(SurefootError, match=r"after 3 repetitions the gradient of .* still does not fit") as caught:
        runner.run([atom(0)], start=growing, loss=loss_of)
    assert "the same atoms gave other gradients each time" in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_overflow_and_leaves_the_units(value: float) -> None:
    model = model_of()
    runner, sums = made(model)
    runner.run([atom(0)], start=start, loss=loss_of)
    before = dict(sums.exponents)
    handle = model.inner.register_full_backward_hook(lambda *_: (torch.full((2, 5, 6), value),))
    runner.run([atom(0), atom(1)], start=start, loss=loss_of)
    handle.remove()
    assert sums.exponents == before
    assert not sums.take_redos()
    assert sums.bound.largest == math.inf
    assert sums.bound.num_nonfinite == 1


def test_all_zero_gradients_need_no_unit() -> None:
    model = model_of()
    runner, sums = made(model)
    for _ in range(2):
        runner.run([atom(0, live=False)], start=start, loss=loss_of)
        assert set(sums.exponents.values()) == {None}
        assert sums.bound.largest == 0.0
        assert all(not gradient.any() for gradient in gradients(model).values())
    runner.run([atom(0)], start=start, loss=loss_of)
    assert sums.exponents["inner.weight"] is not None
    kept = dict(sums.exponents)
    runner.run([atom(0, live=False)], start=start, loss=loss_of)
    assert sums.exponents == kept


class Hoarding(nn.Module):
    """Keeps a parameter beside the attribute of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, 6)
        self.head = nn.Linear(6, VOCAB_SIZE)
        self.kept = [self.head.weight]

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.embed(tokens_BS), self.kept[0], self.head.bias)


def test_a_gradient_that_comes_past_the_uses_is_refused_by_name() -> None:
    runner, _ = made(Hoarding())
    with pytest.raises(SurefootError, match=r"head\.weight has a gradient, but no forward read it"):
        runner.run([atom(0)], start=start, loss=loss_of)


class Recurrent(nn.Module):
    """torch's own layer keeps its parameters in a list too, but looks whether the attributes have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)
        self.layer = nn.LSTM(VOCAB_SIZE, VOCAB_SIZE, batch_first=True)

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        out_BSV, _ = self.layer(self.embed(tokens_BS))
        return torch.as_tensor(out_BSV)


def test_a_recurrent_layer_reads_uses() -> None:
    runner, sums = made(Recurrent())
    runner.run([atom(0), atom(1)], start=start, loss=loss_of)
    assert None not in sums.exponents.values()


def test_the_next_units_follow_from_the_largest_gradient_and_the_number_of_addends() -> None:
    known = {"a": -40, "b": None}
    fine = {"a": Seen(1.0, 4, 3.0), "b": Seen(0.0, 1, 0.0)}
    assert next_units(known, fine) == NextUnits({"a": 2 + 6 - 52, "b": None})
    assert next_units(known, fine | {"b": Seen(1.0, 1, 1.0)}) == NextUnits({"a": -44, "b": -46}, unknown=("b",))
    assert next_units(known, fine | {"a": Seen(2.0**12, 1, 0.0)}).must_redo is False
    overflow = next_units(known, fine | {"a": Seen(2.0**12, 2, 0.0)})
    assert (overflow.overflowed, overflow.exponents["a"], overflow.must_redo) == (("a",), 12 + 1 + 6 - 52, True)
    assert next_units(known, fine | {"b": Seen(math.inf, 1, math.inf)}) == NextUnits(known)
    assert next_units(known, fine | {"a": Seen(2.0**-12, 4, 0.0)}).too_coarse == ()
    shrunk = next_units(known, fine | {"a": Seen(2.0**-13, 4, 0.0)})
    assert (shrunk.too_coarse, shrunk.exponents["a"], shrunk.must_redo) == (("a",), -13 + 2 + 6 - 52, True)


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.mark.parametrize("num_elements", [1, 17, 289, 4099])
def test_the_pinned_update_does_not_depend_on_where_a_tensor_is_cut(num_elements: int) -> None:
    """Why exact sums ask for the foreach kernel. The fused one takes the last elements of each piece another way."""

    def after(size: int, *, kernel: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(num_elements)
        parameters = [nn.Parameter(part.clone()) for part in torch.randn(num_elements, generator=generator).split(size)]  # type: ignore[no-untyped-call]
        optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, **{kernel: True})
        for _ in range(5):
            gradient = torch.randn(num_elements, generator=generator)
            for parameter, part in zip(parameters, torch.split(gradient, size), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
        slots = ("exp_avg", "exp_avg_sq")
        moments = [torch.cat([optimizer.state[parameter][slot] for parameter in parameters]) for slot in slots]
        return torch.stack([torch.cat([parameter.detach() for parameter in parameters]), *moments])

    whole = after(num_elements, kernel="foreach")
    for size in (num_elements // 2 + 1, num_elements // 3 + 1, 8, 1):
        assert torch.equal(after(size, kernel="foreach"), whole)
    if num_elements == 4099:  # the control
        assert not torch.equal(after(1, kernel="fused"), after(num_elements, kernel="fused"))
