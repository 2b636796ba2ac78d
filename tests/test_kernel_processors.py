"""The order of rounding does not depend on the processor: the bit tests again, compiled for other processors."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from entmtp_jax.kernels import library, skinny_matmul, tree_attention
from entmtp_jax.kernels.library import KernelLibrary
from tests import test_skinny_matmul, test_tree_attention

# Compiler flags, and the instruction set without which this processor cannot run the result. The third is
# an AMD Zen's: for it GCC avoids chains of fused products, in some tiles and not in others.
PROCESSORS = {
    "sse": ("-march=x86-64-v2", "sse4_2"),
    "fma": ("-march=haswell", "fma"),
    "zen": ("-march=haswell -mtune=znver3", "fma"),
    "avx512": ("-march=skylake-avx512", "avx512vl"),
}


def instruction_sets() -> set[str]:
    """Names in the ``flags`` line of Linux's ``/proc/cpuinfo``; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.startswith("flags") for word in line.split()}


@pytest.fixture(scope="module", params=PROCESSORS)
def processor(request, tmp_path_factory):
    """Both kernels compiled for another processor stand in for this machine's own."""
    flags, needed = PROCESSORS[request.param]
    if needed not in instruction_sets():
        pytest.skip(f"this processor has no {needed}")
    cache = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        own = [flag for flag in library.FLAGS if not flag.startswith("-march")]
        patch.setattr(library, "FLAGS", (*own, *flags.split()))
        for module in (skinny_matmul, tree_attention):
            kernel = KernelLibrary(module.KERNEL.name, symbol=module.KERNEL.symbol)
            kernel.target += f"_{request.param}"  # XLA keeps one function per name
            if not kernel.build(cache):
                pytest.skip(f"no kernel for {flags}: {kernel.reason}")
            patch.setattr(module, "KERNEL", kernel)
        yield


@pytest.mark.parametrize("depth", [576, 1537])
def test_matrix_product(processor, depth):
    def linear(x, w):  # a function of its own: jit would find this machine's program for skinny_matmul.linear
        return skinny_matmul.linear(x, w)

    test_skinny_matmul.test_row_has_the_same_bits_for_every_number_of_rows(linear, depth)
    test_skinny_matmul.test_output_has_the_same_bits_wherever_the_matrix_is_cut(linear)
    test_skinny_matmul.test_bfloat16_weights_equal_their_float32_copies(linear, 9, depth)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dim, heads, groups", [(64, 9, 3), (80, 5, 5), (12, 14, 2)])
def test_attention(processor, dim, heads, groups, dtype):
    attend = test_tree_attention.attend_arrays
    test_tree_attention.test_tree_has_the_bits_of_its_tokens_one_by_one(attend, 61, dim, heads, groups, dtype)
    test_tree_attention.test_rows_of_a_batch_have_the_same_bits_alone(attend)
