import pytest
import torch
from torch import Tensor

from rollart.core.native import native_library
from rollart.engines.torch.panels import PanelKernels, PanelProduct
from rollart.engines.torch.products import Affine, Output


@pytest.fixture(scope="module")
def panels() -> PanelKernels:
    library = native_library("rollart.engines.torch", ("kernels.c", "products.c"), ("DIM=8", "GROUP=2"))
    found = None if library is None else PanelKernels.of(library)
    if found is None:
        pytest.skip("no compiler, or no tile for this processor")
    return found


def linear(x: Tensor, affine: Affine) -> Tensor:
    weight, bias = affine
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def near(made: Tensor, expected: Tensor) -> bool:
    return torch.allclose(made.double(), expected, rtol=1e-5, atol=3e-5)


# Fewer, as many and more than the tokens of a tile and the columns of a panel, on any processor; no multiples either.
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 23, 130)
SHAPES = ((1, 1), (5, 3), (12, 7), (47, 33), (48, 16), (49, 64), (96, 1), (203, 96))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_any_shape_are_those_of_torch(panels: PanelKernels, tokens: int, bias: bool) -> None:
    torch.manual_seed(tokens)
    for outputs, inputs in SHAPES:
        x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
        offset = torch.randn(outputs) if bias else None
        expected = linear(x, (weight, offset))
        product = PanelProduct([(weight, offset)], panels)
        assert near(product.of(x), expected)
        total = torch.randn(tokens, outputs)
        before = total.clone()
        assert product.onto(total, x) is total and near(total, before + expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_several_weights_are_one_product(panels: PanelKernels, tokens: int, bias: bool) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 40)
    affines = [(torch.randn(size, 40), torch.randn(size) if bias else None) for size in (50, 7, 31)]
    out = torch.empty(tokens, 88)
    PanelProduct(affines, panels).into(x, Output(out, ()))
    assert near(out, torch.cat([linear(x, affine) for affine in affines], 1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("inner", [5, 48, 101])
def test_a_gated_product_applies_the_activation(panels: PanelKernels, tokens: int, inner: int, bias: bool) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 20)
    gate, up = ((torch.randn(inner, 20), torch.randn(inner) if bias else None) for _ in range(2))
    out = torch.empty(tokens, inner)
    PanelProduct([gate, up], panels, gated=True).into(x, Output(out, ()))
    gates, ups = (linear(x, affine) for affine in (gate, up))
    assert near(out, torch.nn.functional.silu(gates) * ups)


def test_weights_need_not_be_contiguous_and_threads_change_nothing(panels: PanelKernels) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(19, 30), torch.randn(30, 150).t()
    product, before = PanelProduct([(weight, None)], panels), torch.get_num_threads()
    one = product.of(x)
    try:
        torch.set_num_threads(2)
        two = product.of(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two) and near(one, linear(x, (weight, None)))
