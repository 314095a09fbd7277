import pytest
import torch

from app.ops.gdn import pack, unpack
from app.ops.gdn.packed import columns


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2.0**-17), (torch.float16, 2.0**-21)])
@pytest.mark.parametrize(("k", "v"), [(128, 128), (128, 384), (256, 512)])
def test_a_packed_state_has_the_bytes_of_the_state_and_comes_back_up_to_its_rounding(k, v, dtype, error):
    s_ctx = torch.randn(2, 3, k, v)
    packed = pack(s_ctx, dtype)
    assert (packed.shape, packed.dtype, packed.nbytes) == (s_ctx.shape, torch.float32, s_ctx.nbytes)
    torch.testing.assert_close(unpack(packed, dtype), s_ctx, rtol=error, atol=2.0**-24)


@pytest.mark.parametrize("k", [128, 256])
def test_a_place_in_the_packed_state_is_where_the_kernel_says(k):
    """The head of kernel.cu: what lane c and step s of a fragment hold, for every element."""
    v, half = 128, columns(k)
    s_ctx = torch.arange(k * v).float().view(1, 1, k, v) % 251  # exact in bfloat16
    words = pack(s_ctx, torch.bfloat16).view(-1).view(torch.bfloat16).float()
    words = words.view(v // half, 2, k // 8, half // 8, 8, 8)  # half, term, k / 8, tile j, column n, k % 8
    assert not words[:, 1].any(), "the second term of what one holds is nothing"
    for s in range(k // 16):
        for e in range(2):
            for i in range(8):
                c, pair = divmod(i, 2)
                row = 32 * (s // 2) + 8 * c + 4 * (s % 2) + 2 * e + pair
                for j in range(v // 8):
                    for n in range(8):
                        column = 32 * (j // 4) + 8 * (n // 2) + 2 * (j % 4) + n % 2
                        at = words[j // (half // 8), 0, 2 * s + e, j % (half // 8), n, i]
                        assert at == s_ctx[0, 0, row, column]
