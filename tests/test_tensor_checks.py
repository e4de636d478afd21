"""Shapes and kinds of tensors are checked by the letters of their names, without an operation on a tensor."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from unmask.errors import ConfigError
from unmask.tensor_checks import check_tensors

LETTERS = "BMTV"
SIZES = dict(zip(LETTERS, (2, 3, 5, 7), strict=True))


class Counting(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **kwargs or {})


shapes = st.lists(
    st.permutations(LETTERS).flatmap(lambda letters: st.integers(1, 4).map(lambda n: "".join(letters[:n]))),
    min_size=1,
)


def tensors(letters: list[str]) -> dict[str, torch.Tensor]:
    return {
        f"t{index}_{each}": torch.zeros([SIZES[letter] for letter in each])
        for index, each in enumerate(letters)
    }


@given(shapes)
def test_shapes_that_agree_pass_without_an_operation(letters):
    named = tensors(letters)
    with Counting() as counting:
        check_tensors(**named, left_out_BT=None)
    assert counting.count == 0


@given(shapes, st.data())
def test_one_wrong_size_is_refused_with_both_names_that_disagree(letters, data):
    named = tensors(letters)
    name = data.draw(st.sampled_from(sorted(named)))
    place = data.draw(st.integers(0, named[name].dim() - 1))
    letter = name.split("_")[1][place]
    sharing = [other for other in named if other != name and letter in other.split("_")[1]]
    size = list(named[name].shape)
    size[place] += 1
    named[name] = torch.zeros(size)
    if not sharing:
        check_tensors(**named)  # nothing says what its size should be
        return
    with pytest.raises(ConfigError) as refused:
        check_tensors(**named)
    assert name in str(refused.value) and str(size) in str(refused.value)
    assert any(other in str(refused.value) for other in sharing)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (
            {"ids_BT": torch.zeros(5).long()},
            "ids_BT: has the shape [5], but 2 dimensions are expected: [B, T]",
        ),
        (
            {"key_B": torch.zeros(2, 3).long()},
            "key_B: has the shape [2, 3], but 1 dimension is expected: [B]",
        ),
        ({"a_B1": torch.zeros(2, 3)}, "a_B1: has the shape [2, 3], but [B, 1] is expected"),
        ({"ids_BT": [[1]]}, "ids_BT: is a list, not a tensor"),
        ({"ids_BT": torch.zeros(2, 3)}, "ids_BT: is of torch.float32, not of integers"),
        ({"group_B": torch.zeros(2).bool()}, "group_B: is of torch.bool, not of integers"),
        ({"maskable_BT": torch.zeros(2, 3).long()}, "maskable_BT: is of torch.int64, not torch.bool"),
        (
            {"log_ratio": torch.zeros(2, 3), "advantage": torch.zeros(2)},
            "advantage: has the shape [2], but log_ratio has [2, 3]",
        ),
        ({"log_ratio": torch.zeros(2, 3), "advantage": torch.zeros(3, 1)}, "advantage: has the shape [3, 1]"),
        (
            {"ids_BT": torch.zeros(2, 5).long(), "key_B": torch.zeros(3).long()},
            "key_B: has the shape [3], but [B] is expected: B is 2 in ids_BT of shape [2, 5]",
        ),
    ],
)
def test_the_error_says_which_argument_and_why(named, says):
    with pytest.raises(ConfigError) as refused:
        check_tensors(**named)
    assert says in str(refused.value)


def test_tensors_without_letters_broadcast_to_the_first():
    check_tensors(
        log_ratio=torch.zeros(2, 3),
        advantage=torch.zeros(2, 1),
        importance=torch.zeros(2, 3),
        scale=torch.zeros(()),
    )
