"""Hooks of a replay on real models: what they name, and that they change no bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from surefoot.core.sections import ModelSection
from surefoot.model.attention import largest_logits
from surefoot.model.loss import loss_of
from surefoot.model.transformer import Transformer
from surefoot.parallel.running import Sequential
from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE, Batch
from surefoot.train.hooks import BACKWARD, FORWARD, PARAMETER, Watch, WatchedRunner, name_nonfinite, watch_logits

SECTION = ModelSection(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2)
VOCAB = 64


def model() -> Transformer:
    torch.manual_seed(3)
    made = Transformer(SECTION, VOCAB)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


def atom(index: int, *, phantom_rows: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(index)
    tokens_BS = torch.randint(VOCAB, (2, 16), generator=generator)
    ids_B = torch.tensor([900 + index, PHANTOM_SAMPLE if phantom_rows else 950 + index])  # of a source, not of the run
    labels_BS = tokens_BS.roll(-1, dims=1)
    labels_BS[2 - phantom_rows :] = IGNORED_LABEL
    doc_ids_BS = (torch.arange(16) >= 10).long().expand(2, 16)
    positions_BS = torch.arange(16).expand(2, 16)
    return Batch(tokens_BS, labels_BS, positions_BS, doc_ids_BS, ids_B, num_live_tokens=32, atom=index)


def run(made: nn.Module, *, watched: Watch | None = None, both: bool = True) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Two atoms of step 5, which begins at sample 40; loss and gradients."""
    runner = Sequential(made, torch.device("cpu"), nullcontext())
    chosen: Sequential | WatchedRunner = runner
    if watched is not None:
        watched.step, watched.samples = 5, range(40, 44)
        after: Callable[[], None] = name_nonfinite(made, watched) if both else lambda: None
        watch_logits(made, watched)
        chosen = WatchedRunner(runner, watched, after)
    nats = chosen.run([atom(0), atom(1, phantom_rows=1)], start=lambda _: None, loss=partial(loss_of, z_loss=0.0))
    return nats, [parameter.grad for parameter in made.parameters() if parameter.grad is not None]


def test_they_change_no_bit_and_find_nothing_in_what_is_well() -> None:
    plain, watch = run(model()), Watch(0)
    watched = run(model(), watched=watch)
    assert torch.equal(plain[0], watched[0])
    assert all(torch.equal(one, other) for one, other in zip(plain[1], watched[1], strict=True))
    assert watch.first is None
    assert not torch.equal(run(spoilt(model(), "blocks.1.attention.wq", 1.5))[0], plain[0])  # else the bits above say nothing


def spoilt(made: Transformer, name: str, value: float) -> Transformer:
    with torch.no_grad():
        made.get_submodule(name).weight[3, 4] *= value  # type: ignore[operator,index]  # a module's attribute is unknown to mypy
    return made


def test_a_forward_is_named_by_the_module_that_made_it() -> None:
    watch = Watch(2)
    run(spoilt(model(), "blocks.1.feed_forward.w1", float("inf")), watched=watch)
    first = watch.first
    assert first is not None
    assert (first.step, first.rank, first.atom, first.direction, first.module) == (5, 2, 0, FORWARD, "blocks.1.feed_forward.w1")
    assert (first.samples, first.dtype, first.shape[:2]) == ((40, 41), "float32", (2, 16))
    assert (first.inputs_finite, first.parameters_finite) == (True, False)


def test_only_the_samples_that_hold_it_are_named_and_no_phantom() -> None:
    made, watch = model(), Watch(0)
    second: list[int] = []

    def spoil(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        second.append(1)
        if len(second) < 2:
            return output
        keep_BSD = torch.ones_like(output)
        keep_BSD[0, 7] = torch.nan
        return output * keep_BSD

    made.get_submodule("blocks.0.attention_norm").register_forward_hook(spoil)
    run(made, watched=watch)
    assert watch.first is not None
    assert (watch.first.atom, watch.first.samples, watch.first.module) == (1, (42,), "blocks.0.attention_norm")
    assert (watch.first.num_nan, watch.first.inputs_finite, watch.first.parameters_finite) == (32, True, True)


def test_a_backward_is_named_by_the_output_whose_gradient_it_is() -> None:
    made, watch = model(), Watch(0)

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * torch.inf

    made.get_submodule("blocks.1.feed_forward_norm").register_forward_pre_hook(lambda _, given: (Bad.apply(given[0]),))  # type: ignore[no-untyped-call]
    run(made, watched=watch)
    assert watch.first is not None
    assert (watch.first.direction, watch.first.atom, watch.first.module) == (BACKWARD, 0, "blocks.1.attention.wo")
    assert watch.first.inputs_finite is None


def test_a_gradient_that_is_too_large_for_its_parameter_alone_is_named() -> None:
    made, watch = model(), Watch(0)
    parameter = made.get_parameter("blocks.0.attention.wv.weight")
    parameter.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]  # unannotated in torch
    run(made, watched=watch)
    assert watch.first is not None
    assert (watch.first.direction, watch.first.tensor) == (PARAMETER, "blocks.0.attention.wv.weight")
    assert (watch.first.atom, watch.first.samples) == (0, (40, 41))


def test_nothing_is_looked_at_outside_the_range() -> None:
    made, watch = spoilt(model(), "blocks.0.attention.wq", float("nan")), Watch(0)
    after = name_nonfinite(made, watch)
    assert watch_logits(made, watch) == 2
    batch = atom(0)
    made(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS).sum().backward()
    after()
    assert watch.first is None
    assert watch.logits == {}


def test_logits_are_the_largest_that_a_query_sees_and_say_in_which_sample() -> None:
    watch, made = Watch(0, tp=1), model()
    run(made, watched=watch, both=False)
    assert list(watch.logits) == [(5, "blocks.0.attention.core"), (5, "blocks.1.attention.core")]
    told = watch.as_json()["logits"]
    assert [(layer["first_head"], len(layer["heads"])) for layer in told] == [(4, 4), (4, 4)]
    assert {sample for _, sample in told[0]["heads"]} <= {40, 41, 42}


@pytest.mark.parametrize("scale", [None, 0.125])
def test_largest_logits_are_those_of_the_whole_product(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    q_BHSE, k_BKTE = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    mask_B1ST = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9).clone()
    mask_B1ST[1, 0, 5:, :5] = False
    scores_BHST = q_BHSE @ k_BKTE.repeat_interleave(2, dim=1).transpose(-1, -2) * (scale or 8**-0.5)
    wanted_BH = scores_BHST.masked_fill(~mask_B1ST, -torch.inf).amax(dim=(2, 3))
    assert torch.allclose(largest_logits(q_BHSE, k_BKTE, mask_B1ST=mask_B1ST, scale=scale), wanted_BH)
    monkeypatch.setattr("surefoot.model.attention._MAX_SCORES", 2 * 9 * 4)  # in pieces of four queries
    assert torch.allclose(largest_logits(q_BHSE, k_BKTE, mask_B1ST=mask_B1ST, scale=scale), wanted_BH)
    assert not torch.allclose(wanted_BH, scores_BHST.amax(dim=(2, 3)))  # the mask decides
