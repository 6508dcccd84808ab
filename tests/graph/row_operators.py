"""Operators of torch on samples, each with what is right about it: as `row_cases`, family by family.

New cases go here: where the samples stay independent, to the table of the operator's family (`FAMILIES`, which make
`INDEPENDENT`); where they do not, to `COUPLED`. An operator with a rule of its own gets one of each. `REFUSED` of
`row_cases` is for names of both files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (has the operator for groups of types without a kernel)
from row_cases import ROWS, TIME, WIDTH, Forward, column, img, labels, marks, scalars, seq, words, x
from torch import Tensor

Cases = dict[str, tuple[Forward, list[Callable[[], Tensor]]]]


def signs() -> Tensor:
    return torch.randint(0, 2, (ROWS,)).double() * 2 - 1


def many_labels() -> Tensor:
    """For each sample some classes, then -1."""
    classes = torch.stack([torch.randperm(WIDTH) for _ in range(ROWS)])
    return classes.masked_fill(torch.arange(WIDTH) >= torch.randint(1, WIDTH, (ROWS, 1)), -1)


def theta() -> Tensor:
    return torch.randn(ROWS, 2, 3)


def grid() -> Tensor:
    return torch.rand(ROWS, 3, 3, 2) * 2 - 1


def volume() -> Tensor:
    return torch.randn(ROWS, 2, 4, 4, 4, requires_grad=True)


def channels() -> Tensor:
    """Channels and time."""
    return torch.randn(ROWS, 2, 8, requires_grad=True)


def flags() -> Tensor:
    return torch.rand(ROWS, TIME) > 0.4


def ranks() -> Tensor:
    return torch.sort(torch.randn(ROWS, TIME), 1).values


def _square(m: Any, a: Tensor) -> Tensor:
    """Well conditioned matrices (WIDTH, WIDTH), one for each sample of a sequence."""
    b = a @ m.w
    return b.mT @ b + 3 * torch.eye(WIDTH)


def _put(m: Any, a: Tensor) -> Tensor:
    out = (a @ m.w).clone()
    out[:, torch.tensor([0, 2])] = 1.0
    return out


def _put_columns(m: Any, a: Tensor) -> Tensor:
    out = torch.zeros_like(a)
    out[:, torch.tensor([4, 1, 3])] = (a @ m.w)[:, :3]
    return out


def _put_own(m: Any, a: Tensor, i: Tensor, c: Tensor) -> Tensor:
    out = (a @ m.w).clone()
    out[torch.arange(a.shape[0]), i] = c
    return out


def _put_added(m: Any, a: Tensor, i: Tensor) -> Tensor:
    rows = torch.arange(a.shape[0])[:, None]
    return torch.zeros(a.shape[0], 9).index_put((rows, i), a[..., 0] * m.b[0], accumulate=True)


def _put_where(m: Any, a: Tensor, k: Tensor) -> Tensor:
    out = (a @ m.w).clone()
    out[k] = 0.5
    return out


def _put_vectors_where(m: Any, a: Tensor, k: Tensor) -> Tensor:
    out = (a @ m.w).clone()
    out[k] = m.b
    return out


def _put_samples(m: Any, a: Tensor) -> Tensor:
    out = a @ m.w
    out[torch.tensor([0, 1])] = 0.0
    return out


def _put_values_where(m: Any, a: Tensor, k: Tensor) -> Tensor:
    out = (a @ m.w).clone()
    out[k] = out[k].flip(0)
    return out


def _two_views(m: Any, a: Tensor, b: Tensor) -> Tensor:
    both = torch.cat([a, b]) @ m.w
    first, second = both.chunk(2)
    return F.cosine_similarity(first, second).mean()


def _views_by_slices(m: Any, a: Tensor, b: Tensor) -> Tensor:
    both = F.gelu(torch.cat([a, b, a * b]) @ m.w)
    rows = a.shape[0]
    return both[:rows] - both[rows : 2 * rows] * both[2 * rows :]


def _views_by_split(m: Any, a: Tensor, b: Tensor) -> Tensor:
    first, second = (torch.cat([a, b]) @ m.w).split(a.shape[0])
    return torch.cat([first, second], 1)


def _views_by_view(m: Any, a: Tensor, b: Tensor) -> Tensor:
    return (torch.cat([a, b]) @ m.w).view(2, -1, WIDTH).prod(0)


def _several_answers(m: Any, a: Tensor) -> Tensor:
    """Three answers for each sample, side by side in the batch, then the best of them."""
    beams = a.repeat_interleave(3, 0) + m.b.repeat(3 * a.shape[0], 1) * torch.arange(3.0).repeat(a.shape[0])[:, None]
    return (beams @ m.w).view(-1, 3, WIDTH).amax(1)


def _relative_positions(m: Any, a: Tensor) -> Tensor:
    """A table for each head, repeated for each sample, as DeBERTa does it."""
    heads = a.view(-1, TIME, 2, 3).transpose(1, 2).reshape(-1, TIME, 3)
    table = m.w[:, :3].view(2, 3, 3)
    return torch.bmm(heads, table.repeat(heads.size(0) // 2, 1, 1)).view(-1, 2, TIME, 3)


def _cells(m: Any, a: Tensor) -> Tensor:
    w, b = m.w.repeat(4, 1), m.b.repeat(4)
    h, c = torch.lstm_cell(a, (a, torch.zeros_like(a)), w, w, b, b)
    return torch.gru_cell(h, c, w[: 3 * WIDTH], w[: 3 * WIDTH], b[: 3 * WIDTH])


def _masked_attention(m: Any, a: Tensor, k: Tensor, **kwargs: Any) -> Tensor:
    q = (a @ m.w).view(-1, TIME, 2, 3).transpose(1, 2)
    keep = (k | torch.eye(TIME, dtype=torch.bool)[0])[:, None, None, :]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=keep, **kwargs)


def _additive_mask(m: Any, a: Tensor, k: Tensor) -> Tensor:
    q = (a @ m.w)[:, None]
    bias = torch.zeros(k.shape).masked_fill(~k, -9.0)[:, None, None, :] + torch.ones(TIME, TIME).triu(1) * -9.0
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias)


def _bags(m: Any, i: Tensor, **kwargs: Any) -> Tensor:
    return F.embedding_bag(i, m.table.weight, **kwargs)


def _weighted_bags(m: Any, i: Tensor, a: Tensor) -> Tensor:
    return F.embedding_bag(i, m.table.weight, per_sample_weights=a[..., 0], mode="sum")


def _routed(m: Any, a: Tensor, experts: int = 3, other: bool = False, back: str = "put") -> Tensor:
    """A mixture of experts whose tokens are sorted by their expert; with a fault, where the arguments say so."""
    tokens = a.reshape(-1, WIDTH)
    weight, choice = (tokens @ m.w[:, :3]).softmax(-1).topk(2, -1)
    keys, order = torch.sort(choice.reshape(-1))
    counted = torch.sort((choice + 1).reshape(-1)).values - 1 if other else keys
    ends = torch.histc(counted.double(), bins=experts, min=0, max=experts - 1).cumsum(0).int()
    matrices = torch.stack([m.w, m.w.t(), m.w * 2, m.w * 3][:experts])
    values = tokens[order // 2]
    hidden = F.gelu(torch.ops.transformers.grouped_mm_fallback(values, matrices, ends) + m.b)
    hidden = hidden * weight.reshape(-1)[order][:, None]
    if back == "put":
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
    else:
        inverse = order if back == "forth" else order.argsort()
    return hidden[inverse].view(-1, TIME, 2, WIDTH).sum(2)


ROUTED: Cases = {
    "experts, sorted": (_routed, [seq]),
    "experts, sorted and back by sorting": (partial(_routed, back="sort"), [seq]),
}

PRODUCTS: Cases = {
    "einsum with an ellipsis": (lambda m, a: torch.einsum("...d,de->...e", a, m.w), [seq]),
    "einsum within, with an ellipsis": (lambda m, a: torch.einsum("...qd,...kd->...qk", a, a @ m.w), [seq]),
    "einsum without a result": (lambda m, a: torch.einsum("btd,de", a, m.w), [seq]),
    "einsum without a result, sorted": (lambda m, a: torch.einsum("zd,da", a, m.w).t(), [x]),
    "einsum of a broadcast one": (lambda m, a: torch.einsum("btd,bed->bte", a, m.w[None]), [seq]),
    "einsum to a number": (lambda m, a: torch.einsum("bd,bd->", a, a @ m.w), [x]),
    "einsum over samples, summed": (lambda m, a: (torch.einsum("bd,be->de", a, a) * m.w).sum(), [x]),
    "tensordot": (lambda m, a: torch.tensordot(a, m.w.view(WIDTH, 2, 3), 1), [seq]),
    "tensordot, fixed first": (lambda m, a: torch.tensordot(m.w, a, dims=([1], [1])).t(), [x]),
    "outer": (lambda m, c: torch.outer(c, m.b), [scalars]),
    "outer, fixed first": (lambda m, c: torch.outer(m.b, c).t(), [scalars]),
    "dot": (lambda m, a, c: torch.dot(a @ m.b, c), [x, scalars]),
    "vectors multiplied": (lambda m, a, c: (a @ m.b) @ c, [x, scalars]),
    "bilinear": (lambda m, a: F.bilinear(a, a.cos(), m.w[:3, :, None] * m.b, m.b[:3]), [seq]),
    "distances within": (lambda m, a: torch.cdist(a, a @ m.w), [seq]),
    "distances to codes": (lambda m, a: torch.cdist(a @ m.w, m.table.weight), [x]),
    "distances from codes": (lambda m, a: torch.cdist(m.table.weight, a @ m.w).t(), [x]),
    "distances to codes, with time": (lambda m, a: torch.cdist(a @ m.w, m.table.weight[None], p=1.0), [seq]),
    "attention with a mask": (_masked_attention, [seq, flags]),
    "attention with added masks": (_additive_mask, [seq, flags]),
    "causal attention": (
        lambda m, a: F.scaled_dot_product_attention(a[:, None] @ m.w, a[:, None], a[:, None], is_causal=True),
        [seq],
    ),
    "grouped attention": (
        lambda m, a: (lambda q: F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True))(
            (a @ m.w).view(-1, TIME, 2, 3).transpose(1, 2)
        ),
        [seq],
    ),
    "padding mask": (lambda m, a, k: m.attention(a, a, a, key_padding_mask=~k & (k.cumsum(1) > 1))[0], [seq, flags]),
    "relative positions": (_relative_positions, [seq]),
}

ALGEBRA: Cases = {
    "inverse": (lambda m, a: torch.linalg.inv(_square(m, a)), [seq]),
    "solve": (lambda m, a: torch.linalg.solve(_square(m, a), a.mT), [seq]),
    "determinant": (lambda m, a: torch.linalg.slogdet(_square(m, a)), [seq]),
    "cholesky": (lambda m, a: torch.linalg.cholesky(_square(m, a)), [seq]),
    "qr": (lambda m, a: torch.linalg.qr(_square(m, a)).R.abs(), [seq]),
    "eigenvalues": (lambda m, a: torch.linalg.eigvalsh(_square(m, a)), [seq]),
    "singular values": (lambda m, a: torch.linalg.svdvals(_square(m, a)), [seq]),
    "matrix exponential": (lambda m, a: torch.linalg.matrix_exp(_square(m, a) / 40), [seq]),
    "power of matrices": (lambda m, a: torch.linalg.matrix_power(_square(m, a), 3), [seq]),
    "triangular solve": (
        lambda m, a: torch.linalg.solve_triangular(_square(m, a).tril(), a.mT, upper=False),
        [seq],
    ),
    "cross": (lambda m, a: torch.linalg.cross((a @ m.w)[:, :3], a[:, 3:]), [x]),
    "fft": (lambda m, a: torch.fft.rfft(a @ m.w, dim=1).abs(), [seq]),
    "fft there and back": (lambda m, a: torch.fft.irfft(torch.fft.rfft(a, dim=1) * m.b, n=TIME, dim=1), [seq]),
    "fft of images": (lambda m, a: torch.fft.fft2(m.conv(a)).real, [img]),
    "fft of many dimensions": (lambda m, a: torch.fft.fftshift(torch.fft.fftn(m.conv(a), dim=(1, 3)), 3).imag, [img]),
    "spectrogram": (
        lambda m, a: torch.stft(a[:, 0] * m.b[0], 4, 2, window=torch.ones(4), center=False, return_complex=True).abs(),
        [channels],
    ),
    "diagonal": (lambda m, a: torch.diagonal(_square(m, a), dim1=1, dim2=2), [seq]),
    "diagonals": (lambda m, a: torch.diag_embed(a @ m.w), [x]),
    "complex": (lambda m, a: torch.view_as_real(torch.view_as_complex((a @ m.w).view(-1, 3, 2)) * 1j), [x]),
}

PLANES: Cases = {
    "conv1d": (lambda m, a: F.conv1d(a, m.w.view(6, 2, 3), m.b, padding=1, stride=2), [channels]),
    "conv3d": (lambda m, a: F.conv3d(a, m.w[:4].reshape(3, 2, 1, 2, 2)), [volume]),
    "conv1d transposed": (lambda m, a: F.conv_transpose1d(a, m.w.view(2, 6, 3), stride=2), [channels]),
    "conv2d transposed": (lambda m, a: F.conv_transpose2d(a, m.w.view(2, 2, 3, 3)), [img]),
    "conv3d transposed": (lambda m, a: F.conv_transpose3d(a, m.w[:4].reshape(2, 3, 1, 2, 2)), [volume]),
    "grouped convolution": (lambda m, a: F.conv2d(a, m.w.view(4, 1, 3, 3), groups=2), [img]),
    "max pool 1d": (lambda m, a: F.max_pool1d(a * m.b[0], 2), [channels]),
    "max pool 3d": (lambda m, a: F.max_pool3d(a * m.b[0], 2), [volume]),
    "max pool with indices": (lambda m, a: F.max_pool2d(m.conv(a), 2, return_indices=True), [img]),
    "unpool": (lambda m, a: F.max_unpool2d(*F.max_pool2d(m.conv(a), 2, return_indices=True), 2), [img]),
    "average pool 1d": (lambda m, a: F.avg_pool1d(a * m.b[0], 2), [channels]),
    "average pool 2d": (lambda m, a: F.avg_pool2d(m.conv(a), 2), [img]),
    "average pool 3d": (lambda m, a: F.avg_pool3d(a * m.b[0], 2), [volume]),
    "lp pool": (lambda m, a: F.lp_pool2d(m.conv(a), 3, 2), [img]),
    "adaptive pools": (lambda m, a: F.adaptive_max_pool2d(m.conv(a), 2) + F.adaptive_avg_pool2d(a[:, :1], 2), [img]),
    "adaptive pool 1d": (lambda m, a: F.adaptive_avg_pool1d(a, 3) * m.b[:3], [channels]),
    "adaptive pool 3d": (lambda m, a: F.adaptive_avg_pool3d(a, 2) * m.b[0], [volume]),
    "pool of samples in front of a channel": (lambda m, a: F.max_pool2d(m.conv(a)[:, 0][None], 2)[0], [img]),
    "masks resized": (lambda m, a: F.interpolate((a[:, 0] * m.b[0])[None], size=(2, 2))[0], [img]),
    **{
        f"resized, {mode}": (
            partial(lambda m, a, mode: F.interpolate(m.conv(a), size=(6, 3), mode=mode), mode=mode),
            [img],
        )
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    "resized, antialiased": (
        lambda m, a: F.interpolate(m.conv(a), size=(2, 3), mode="bilinear", antialias=True),
        [img],
    ),
    "resized, linear": (lambda m, a: F.interpolate(a * m.b[0], size=5, mode="linear"), [channels]),
    "resized, trilinear": (lambda m, a: F.interpolate(a * m.b[0], scale_factor=2.0, mode="trilinear"), [volume]),
    "pixel unshuffle": (lambda m, a: F.pixel_unshuffle(m.conv(a), 2), [img]),
    "channel shuffle": (lambda m, a: F.channel_shuffle(m.conv(a), 2), [img]),
    "windows of an image": (lambda m, a: F.unfold(m.conv(a), 2), [img]),
    "windows put together": (lambda m, a: F.fold(F.unfold(m.conv(a), 2), (4, 4), 2), [img]),
    "windows of a series": (lambda m, a: (a @ m.w).unfold(1, 3, 2), [seq]),
    "sampled at places": (lambda m, a, g: F.grid_sample(m.conv(a), g, align_corners=False), [img, grid]),
    "affine": (
        lambda m, a, t: F.grid_sample(
            m.conv(a), F.affine_grid(t, list(a.shape), align_corners=False), align_corners=False
        ),
        [img, theta],
    ),
    **{
        f"padded, {mode}": (partial(lambda m, a, mode: F.pad(m.conv(a), (1, 2, 0, 1), mode=mode), mode=mode), [img])
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    "local response norm": (lambda m, a: F.local_response_norm(m.conv(a), 2), [img]),
    "group norm of vectors": (lambda m, a: F.group_norm(a @ m.w, 2), [x]),
    "instance norm with weights": (lambda m, a: F.instance_norm(m.conv(a), weight=m.b[:4], bias=m.b[:4]), [img]),
    "dropped channels, off": (lambda m, a: F.dropout2d(m.conv(a), 0.5, training=False), [img]),
}

WITHIN: Cases = {
    "nan to num": (lambda m, a: torch.nan_to_num((a @ m.w) / (a > 0)), [x]),
    "glu": (lambda m, a: F.glu(a @ m.w, 1), [x]),
    "prelu": (lambda m, a: F.prelu(a @ m.w, m.b), [x]),
    "cumulative product": (lambda m, a: torch.cumprod(a @ m.w, 1), [x]),
    "cumulative maximum": (lambda m, a: torch.cummax(a @ m.w, 1).values, [x]),
    "cumulative logsumexp": (lambda m, a: torch.logcumsumexp(a @ m.w, 1), [x]),
    "differences": (lambda m, a: torch.diff(a @ m.w, dim=1), [x]),
    "argsort": (lambda m, a: (a @ m.w).gather(1, a.argsort(1)), [x]),
    "nanmedian": (lambda m, a: (a @ m.w).nanmedian(1).values, [x]),
    "kth value": (lambda m, a: (a @ m.w).kthvalue(2, 1).values, [x]),
    "quantile within": (lambda m, a: torch.quantile(a @ m.w, 0.3, dim=1), [x]),
    "quantiles within": (lambda m, a: torch.quantile(a @ m.w, torch.tensor([0.1, 0.9]), dim=1).t(), [x]),
    "cosine similarity": (lambda m, a: F.cosine_similarity(a, a @ m.w), [x]),
    "cosine similarity to one": (lambda m, a: F.cosine_similarity(a @ m.w, m.b, dim=-1), [seq]),
    "pairwise distance": (lambda m, a: F.pairwise_distance(a, a @ m.w, keepdim=True), [x]),
    "each sample renormed": (lambda m, a: torch.renorm(a @ m.w, 2.0, 0, 1.0), [x]),
    "one sided norms": (lambda m, a: torch.linalg.norm(a @ m.w, dim=(1, 2)), [seq]),
    "scatter add": (lambda m, a, i: torch.zeros_like(a).scatter_add(1, i[:, None], a[:, :1]) @ m.w, [x, labels]),
    "scatter reduce": (
        lambda m, a, i: torch.zeros_like(a).scatter_reduce(1, i[:, None], a[:, :1], "amax") @ m.w,
        [x, labels],
    ),
    "index add": (lambda m, a: torch.zeros_like(a).index_add(1, torch.tensor([1, 1]), (a @ m.w)[:, :2]), [x]),
    "index copy": (lambda m, a: torch.zeros_like(a).index_copy(1, torch.tensor([3, 1]), (a @ m.w)[:, :2]), [x]),
    "index fill": (lambda m, a: (a @ m.w).index_fill(1, torch.tensor([2]), 7.0), [x]),
    "index select within": (lambda m, a: (a @ m.w).index_select(1, torch.tensor([2, 2])), [x]),
    "columns": (lambda m, a: (a @ m.w)[:, torch.tensor([4, 0, 4])], [x]),
    "places that are apart": (lambda m, a: (a @ m.w)[:, torch.tensor([1, 0])][:, :, torch.tensor([2])], [seq]),
    "dimensions that are apart": (
        lambda m, a: m.conv(a)[:, torch.tensor([1, 0]), :, torch.tensor([2, 3])].transpose(0, 1),
        [img],
    ),
    "own place, apart": (lambda m, a, i: (a @ m.w)[torch.arange(len(a)), :, i], [seq, labels]),
    "columns written": (_put, [x]),
    "columns put": (_put_columns, [x]),
    "own place written": (_put_own, [x, labels, scalars]),
    "own places added to": (_put_added, [seq, words]),
    "written where a mask says": (_put_where, [seq, flags]),
    "vectors written where a mask says": (_put_vectors_where, [seq, flags]),
    "buckets": (lambda m, a: m.table.weight[torch.bucketize(a @ m.b, torch.arange(-3.0, 4.0))], [x]),
    "searched in one row": (lambda m, a: m.table.weight[torch.searchsorted(torch.arange(-3.0, 4.0), a @ m.b)], [x]),
    "searched in rows": (lambda m, a, r: m.table.weight[torch.searchsorted(r, a @ m.w)], [x, ranks]),
    "one hot of places": (lambda m, i: F.one_hot(i, 9).double() @ m.table.weight, [words]),
    "bags": (_bags, [words]),
    "bags, sum": (partial(_bags, mode="sum"), [words]),
    "bags, greatest": (partial(_bags, mode="max"), [words]),
    "bags, weighted": (_weighted_bags, [words, seq]),
    "cells": (_cells, [x]),
    "type of another": (lambda m, a, c: (a.type_as(m.w) @ m.w, m.w.type_as(a).t(), c.to(m.table.weight)), [x, column]),
    "side by side": (lambda m, a, c: torch.column_stack((a @ m.w, c, c)), [x, scalars]),
    "hstack": (lambda m, a: torch.hstack([a @ m.w, a]), [x]),
    "at least": (lambda m, c: torch.atleast_2d(c).t() * m.b, [scalars]),
}

BLOCKS: Cases = {
    "samples repeated": (lambda m, a: a.repeat_interleave(2, 0) @ m.w, [x]),
    "several answers": (_several_answers, [x]),
    "two views": (_two_views, [x, x]),
    "two views, stacked and flattened": (
        lambda m, a, b: (torch.stack([a, b]).flatten(0, 1) @ m.w).unflatten(0, (2, -1)).sum(0),
        [x, x],
    ),
    "views taken apart by slices": (_views_by_slices, [x, x]),
    "views taken apart by split": (_views_by_split, [x, x]),
    "views taken apart by view": (_views_by_view, [x, x]),
    "views taken apart by vstack": (lambda m, a, b: (torch.vstack([a, b]) @ m.w).view(2, -1, WIDTH)[1], [x, x]),
    "one for each": (lambda m, a: (torch.zeros(a.shape[0] * 2, WIDTH) + m.b).view(-1, 2, WIDTH) + a[:, None], [x]),
    "repeated and joined": (lambda m, a: (a.repeat(3, 1) @ m.w).view(3, -1, WIDTH).mean(0), [x]),
    "mean over samples, then summed": (lambda m, a: (a @ m.w).square().mean(0).sum(), [x]),
    "losses of tasks": (lambda m, a: ((a @ m.w).square().mean(0) * torch.arange(6.0)).sum(), [x]),
}

LOSSES: Cases = {
    **{
        f"{name}, {reduction}": (partial(function, reduction=reduction), make)
        for reduction in ("mean", "sum", "none")
        for name, function, make in (
            (
                "triplets",
                lambda m, a, b, c, reduction: F.triplet_margin_loss(a @ m.w, b, c, reduction=reduction),
                [x] * 3,
            ),
            (
                "triplets of sequences",
                lambda m, a, b, reduction: F.triplet_margin_loss(
                    a @ m.w, b, m.b[None, None], swap=True, reduction=reduction
                ),
                [seq] * 2,
            ),
            (
                "cosine embedding",
                lambda m, a, b, y, reduction: F.cosine_embedding_loss(a @ m.w, b, y, 0.1, reduction=reduction),
                [x, x, signs],
            ),
            (
                "margin ranking",
                lambda m, a, b, y, reduction: F.margin_ranking_loss(a @ m.b, b, y, 0.5, reduction=reduction),
                [x, scalars, signs],
            ),
            (
                "multi margin",
                lambda m, a, y, reduction: F.multi_margin_loss(a @ m.w, y, weight=m.running + 2, reduction=reduction),
                [x, labels],
            ),
            (
                "multilabel margin",
                lambda m, a, y, reduction: F.multilabel_margin_loss(a @ m.w, y, reduction=reduction),
                [x, many_labels],
            ),
            (
                "multilabel soft margin",
                lambda m, a, b, reduction: F.multilabel_soft_margin_loss(
                    a @ m.w, b.gt(0).double(), m.running + 2, reduction=reduction
                ),
                [x, x],
            ),
            (
                "triplets by distance",
                lambda m, a, b, c, reduction: F.triplet_margin_with_distance_loss(a @ m.w, b, c, reduction=reduction),
                [x] * 3,
            ),
            (
                "hinge embedding",
                lambda m, a, y, reduction: F.hinge_embedding_loss(a @ m.b, y, reduction=reduction),
                [x, signs],
            ),
            ("soft margin", lambda m, a, y, reduction: F.soft_margin_loss(a @ m.b, y, reduction=reduction), [x, signs]),
            ("huber", lambda m, a, c, reduction: F.huber_loss(a @ m.b, c, reduction=reduction), [x, scalars]),
            ("l1", lambda m, a, c, reduction: F.l1_loss(a @ m.b, c, reduction=reduction), [x, scalars]),
            (
                "poisson",
                lambda m, a, c, reduction: F.poisson_nll_loss(a @ m.b, c.abs(), full=True, reduction=reduction),
                [x, scalars],
            ),
            (
                "bce with class weights",
                lambda m, a, b, reduction: F.binary_cross_entropy_with_logits(
                    a @ m.w, b.sigmoid(), m.running + 2, pos_weight=m.running + 3, reduction=reduction
                ),
                [x, x],
            ),
            (
                "bce with sample weights",
                lambda m, a, c, d, reduction: F.binary_cross_entropy(
                    (a @ m.b).sigmoid(), c.sigmoid(), d, reduction=reduction
                ),
                [x, scalars, scalars],
            ),
            (
                "nll of places",
                lambda m, a, y, reduction: F.nll_loss(
                    (a @ m.w).log_softmax(-1).mT[:, :, None].contiguous(), y[:, None], reduction=reduction
                ),
                [seq, marks],
            ),
        )
    },
    "kl of logs": (
        lambda m, a, b: F.kl_div((a @ m.w).log_softmax(1), b.log_softmax(1), reduction="batchmean", log_target=True),
        [x, x],
    ),
}  # fmt: skip

FAMILIES = (ROUTED, PRODUCTS, ALGEBRA, PLANES, WITHIN, BLOCKS, LOSSES)
INDEPENDENT: Cases = {name: case for family in FAMILIES for name, case in family.items()}

COUPLED: Cases = {
    "more groups than choices": (partial(_routed, experts=4), [seq]),
    "groups of another order": (partial(_routed, other=True), [seq]),
    "sorted twice": (partial(_routed, back="forth"), [seq]),
    "sorted and not put back": (lambda m, a: (a @ m.w)[(a @ m.b).sort().indices], [x]),
    "sorted keys": (lambda m, a: (a @ m.b).sort().values, [x]),
    "order as numbers": (lambda m, a: a * (a @ m.b).argsort().argsort()[:, None], [x]),
    "picked by the order": (lambda m, a: m.table.weight[(a @ m.b).argsort()], [x]),
    "neighbours in the order": (
        lambda m, a: (lambda order: a[order].diff(dim=0).sum() + a[order][order.argsort()])((a @ m.b).argsort()),
        [x],
    ),
    "running sum in the order": (
        lambda m, a: (lambda order: (a @ m.w)[order].cumsum(0)[order.argsort()])((a @ m.b).argsort()),
        [x],
    ),
    "back from another order": (
        lambda m, a: (a @ m.w)[(a @ m.b).argsort()][a[:, 0].argsort().argsort()],
        [x],
    ),
    "einsum of all pairs": (lambda m, a: torch.einsum("...bd,...cd->bc", a, a @ m.w) @ a, [x]),
    "einsum of pairs without a result": (lambda m, a: torch.einsum("bd,cd", a, a @ m.w) @ a, [x]),
    "tensordot over samples": (lambda m, a: torch.tensordot(a, a @ m.w, dims=([0], [0])), [x]),
    "outer of all pairs": (lambda m, a: torch.outer(a @ m.b, a[:, 0]) @ a, [x]),
    "distances of all": (lambda m, a: torch.cdist(a @ m.w, a), [x]),
    "closest distance": (lambda m, a: torch.nn.functional.pdist(a @ m.w).amin(), [x]),
    "inverse over samples": (lambda m, a: torch.linalg.pinv(a @ m.w) @ a, [x]),
    "singular values of all": (lambda m, a: torch.linalg.svdvals(a @ m.w), [x]),
    "fft over samples": (lambda m, a: torch.fft.fft(a @ m.w, dim=0).abs(), [x]),
    "fft of all dimensions": (lambda m, a: torch.fft.fftn(a @ m.w).abs(), [x]),
    "fft shift of all": (lambda m, a: torch.fft.fftshift(a @ m.w), [x]),
    "windows over samples": (lambda m, a: (a @ m.w).unfold(0, 2, 1), [x]),
    "renormed columns": (lambda m, a: torch.renorm(a @ m.w, 2.0, 1, 1.0), [x]),
    "quantile of all": (lambda m, a: torch.quantile(a @ m.w, 0.5), [x]),
    "similarity over samples": (lambda m, a: F.cosine_similarity(a, a @ m.w, dim=0), [x]),
    "diagonal over samples": (lambda m, a: torch.diagonal(a @ m.w).sum(), [x]),
    "some samples written": (_put_samples, [x]),
    "values written where a mask says": (_put_values_where, [seq, flags]),
    "bags of all": (lambda m, i: F.embedding_bag(i.flatten(), m.table.weight, torch.tensor([0, 3])), [words]),
    "bags, by frequency": (partial(_bags, scale_grad_by_freq=True), [words]),
    "bags over samples": (lambda m, i: F.embedding_bag(i.t(), m.table.weight), [words]),
    "searched in samples": (lambda m, a, c: torch.searchsorted(c.sort().values, a @ m.b), [x, scalars]),
    "views in another order": (lambda m, a: torch.cat([a, a @ m.w]).view(-1, 2, WIDTH).sum(1), [x]),
    "half of the views": (lambda m, a: torch.cat([a, a @ m.w])[a.shape[0] // 2 :], [x]),
    "second half of all": (lambda m, a: torch.cat([a, a @ m.w])[-2:], [x]),
    "views out of order": (lambda m, a: torch.cat([a, a @ m.w]), [x]),
    "views of different layout": (lambda m, a: torch.cat([a, a]) @ m.w + a.repeat_interleave(2, 0), [x]),
    "mean over samples, squared": (lambda m, a: (a @ m.w).mean(0).square().sum(), [x]),
    "mean over samples, with samples": (lambda m, a: (a * (a @ m.w).mean(0)).sum(), [x]),
    "pools over samples": (lambda m, a: F.adaptive_avg_pool1d((a @ m.w).t(), 2), [x]),
    "triplets over samples": (lambda m, a, b: F.triplet_margin_loss((a @ m.w).t(), b.t(), b.t() + 1), [x, x]),
    "margin of other samples": (
        lambda m, a, b: F.margin_ranking_loss((a @ m.b)[:, None], b[None], b[None]),
        [x, scalars],
    ),
}  # fmt: skip
