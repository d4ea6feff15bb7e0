"""What a model says about how it may be cut: names only. `model` makes it, `parallel` does what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TensorStyle = Literal["vocabulary_rows", "columns", "rows", "gathered", "norm", "head_norm", "last_norm", "vocabulary_columns"]
"""What tensor parallel makes of a submodule. Between the layers, positions are cut; inside them, heads, features or the vocabulary.

vocabulary_rows: an embedding, cut along the vocabulary; positions come out cut. columns: a linear layer, cut along its outputs.
rows: a linear layer, cut along its inputs; positions come out cut. gathered: a module whose one positional argument is all positions.
norm: a norm that is whole, over cut positions. head_norm: one over the dims of each head; heads, its third dim, are cut.
last_norm: as norm, and all positions come out. vocabulary_columns: the linear layer that makes the logits; they come out cut.
"""


@dataclass(frozen=True, slots=True)
class CutPlan:
    """Names of submodules (fqn). `units` are gathered together under full sharding, in the order of the forward; the rest is the root's.

    `blocks` are those of them that repeat: recomputed one by one, and dealt to the stages of a pipeline in this order.
    `first` stand before them and `last` behind; what stands in both is used at both ends of the model. `width` is that of what passes from
    one block to the next: x_BSD with D = `width`.
    `tensor_styles` names every submodule that tensor parallel touches; without any, the model cannot be cut so.
    `attentions` are called as (q_BHSE, k_BKTE, v_BKTE, ...), and `mask`, a module without parameters, as (doc_ids_BS, index_S, keys): for
    context parallel, which has some of a sequence's queries meet all of its keys. Empty: the model cannot be cut so.
    """

    units: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    width: int = 0
    tensor_styles: tuple[tuple[str, TensorStyle], ...] = ()
    attentions: tuple[str, ...] = ()
    mask: str = ""
