"""The number formats of rows in PyTorch: bits to values and values to bits, as `pallas_kernels.formats` says."""

import torch
from torch import Tensor


def rounded(x: Tensor) -> Tensor:
    """float32 x at the nearest bfloat16, ties to even. By its bits: the compiler drops a cast and its inverse."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def e2m1(packed: Tensor) -> Tensor:
    """Values of E2M1 pairs, the low nibble first."""
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    low = (code & 7).float()
    size = torch.where(low < 2, low / 2, (2 + (code & 1)).float() * torch.exp2(((code & 7) >> 1).float() - 2))
    return torch.where(code >= 8, -size, size)


def e8m0(scale: Tensor) -> Tensor:
    """2**(b - 127)."""
    return torch.exp2(scale.float() - 127)


def e8m0_ceil(x: Tensor) -> Tensor:
    """The byte of the smallest power of two >= x, from the bits of normal float32."""
    return ((x.view(torch.int32) + 0x7FFFFF) >> 23).to(torch.uint8)


def e2m1_pairs(x: Tensor, scale: Tensor) -> Tensor:
    """Bytes of the nearest E2M1 codes of x / scale, ties to the even one. Compares; does not divide."""
    size = x.abs()
    ties = ((0.25, 1), (0.75, 0), (1.25, 1), (1.75, 0), (2.5, 1), (3.5, 0), (5.0, 1))
    code = sum(((size > tie * scale) if even else (size >= tie * scale)).to(torch.uint8) for tie, even in ties)
    code = code + torch.signbit(x).to(torch.uint8) * 8
    return code[..., 0::2] | (code[..., 1::2] << 4)


def fp8_row(row: Tensor) -> Tensor:
    """float32 values of K E4M3 codes with K / 32 E8M0 scales behind them."""
    channels = row.shape[-1] // 33 * 32
    codes = row[..., :channels].view(torch.float8_e4m3fn).float()
    return codes * e8m0(row[..., channels:]).repeat_interleave(32, -1)


def nvfp4_row(row: Tensor) -> Tensor:
    """float32 values of K / 2 E2M1 pairs with K / 16 E4M3 scales behind them."""
    half = row.shape[-1] // 9 * 8
    return e2m1(row[..., :half]) * row[..., half:].view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)


def mxfp4_row(row: Tensor) -> Tensor:
    """float32 values of K / 2 E2M1 pairs with K / 32 E8M0 scales behind them."""
    half = row.shape[-1] // 17 * 16
    return e2m1(row[..., :half]) * e8m0(row[..., half:]).repeat_interleave(32, -1)
