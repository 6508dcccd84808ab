"""Small forwards, each with what is right about its samples: functions of a `Small` model and its arguments.

A new case goes to `row_operators`, which has one table for each family of operators. Here are the forwards of common
layers and losses, and what makes the arguments; other tests take some of these cases by their names. test_analysis.py
runs the tables of both files in the same way, and no name is in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Forward = Callable[..., Any]
ROWS, TIME, WIDTH = 7, 5, 6


def x() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def seq() -> torch.Tensor:
    return torch.randn(ROWS, TIME, WIDTH, requires_grad=True)


def img() -> torch.Tensor:
    return torch.randn(ROWS, 2, 4, 4, requires_grad=True)


CLASSES = torch.linspace(0.2, 1.7, WIDTH)
"""Class weights."""


def labels() -> torch.Tensor:
    return torch.randint(0, WIDTH, (ROWS,))


def words() -> torch.Tensor:
    return torch.randint(0, 9, (ROWS, TIME))


def marks() -> torch.Tensor:
    """Labels for every place of a sequence, with a different number of padded ones in each row."""
    value = torch.randint(0, WIDTH, (ROWS, TIME))
    return value.masked_fill(torch.arange(TIME) >= torch.randint(1, TIME + 1, (ROWS, 1)), -100)


def mask() -> torch.Tensor:
    return (torch.rand(ROWS, TIME) > 0.4).double()


def column() -> torch.Tensor:
    return torch.randn(ROWS, 1)


def scalars() -> torch.Tensor:
    return torch.randn(ROWS)


def _assign(m: Any, a: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(a.shape[0], WIDTH)
    out[:, :3] = a[:, 3:]
    out[:, 3:] = (a @ m.w)[:, :3]
    return out


def _buffer(m: Any, a: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return (a @ m.w) * m.count


def _no_grad(m: Any, a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (a @ m.w).abs().amax(1, keepdim=True)
    return a @ m.w / scale


def _autocast(m: Any, a: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return (a @ m.w).sum()


def _masked_loss_in_autocast(m: Any, a: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy((a @ m.w).transpose(1, 2), y)


def _mixed_in_autocast(m: Any, a: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return (a @ m.w).mean() + (a * a).sum()


def _running(m: Any, a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.running.mul_(0.9).add_(a.mean(0), alpha=0.1)
    return a @ m.w - m.running


def _running_scalar(m: Any, a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.count.add_(a.sum())
    return a * m.count


def _first_sample(m: Any, a: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(WIDTH)
    out.copy_(a[0])
    return a @ m.w + out


def _weights_dropout(m: Any, a: torch.Tensor) -> torch.Tensor:
    return a @ F.dropout(m.w, 0.5, training=True)


INDEPENDENT: dict[str, tuple[Forward, list[Callable[[], torch.Tensor]]]] = {
    "linear": (lambda m, a: F.gelu(a @ m.w + m.b) @ m.w.t(), [x]),
    "vector": (lambda m, a: a @ m.b, [x]),
    "vector of a sequence": (lambda m, a: a @ m.b, [seq]),
    "left vector": (lambda m, a: m.b @ a.transpose(1, 2), [seq]),
    "pairs within a sample": (lambda m, a: torch.softmax(a @ a.transpose(1, 2), -1) @ a, [seq]),
    "bmm": (lambda m, a: torch.bmm(a, a.mT) @ (a @ m.w), [seq]),
    "addmm": (lambda m, a: torch.addmm(m.b, a, m.w), [x]),
    "addmm of rows": (lambda m, a: torch.addmm(a, a, m.w, beta=0.5, alpha=2.0), [x]),
    "baddbmm": (lambda m, a: torch.baddbmm(a, a @ a.mT, a), [seq]),
    "fixed on the left": (lambda m, a: torch.matmul(m.w[:5, :5], a), [seq]),
    "softmax": (lambda m, a: torch.softmax(a @ m.w, -1), [x]),
    "cumsum within": (lambda m, a: torch.cumsum(a @ m.w, 1), [x]),
    "flip within": (lambda m, a: a.flip(1) @ m.w, [x]),
    "roll within": (lambda m, a: a.roll(2, dims=1) @ m.w, [x]),
    "sort within": (lambda m, a: torch.sort(a @ m.w, 1).values, [x]),
    "topk": (lambda m, a: (a @ m.w).topk(2, 1).values, [x]),
    "median within": (lambda m, a: (a @ m.w).median(1).values, [x]),
    "max within": (lambda m, a: (a @ m.w).max(1).values, [x]),
    "argmax": (lambda m, a: ((a @ m.w).argmax(1), a @ m.w), [x]),
    "centred": (lambda m, a: a @ m.w - a.mean(1, keepdim=True), [x]),
    "variance": (lambda m, a: torch.var_mean(a @ m.w, 1), [x]),
    "norm": (lambda m, a: F.normalize(a @ m.w, dim=-1), [x]),
    "layer norm": (lambda m, a: m.norm(a) @ m.w, [seq]),
    "rms norm": (lambda m, a: F.rms_norm(a @ m.w, (WIDTH,), m.b), [seq]),
    "conv": (lambda m, a: m.group_norm(m.conv(a)).relu().flatten(1), [img]),
    "pool": (lambda m, a: F.adaptive_avg_pool2d(F.max_pool2d(m.conv(a), 2), 1).flatten(1), [img]),
    "interpolate": (lambda m, a: F.interpolate(m.conv(a), scale_factor=2, mode="bilinear"), [img]),
    "pixel shuffle": (lambda m, a: F.pixel_shuffle(m.conv(a), 2), [img]),
    "instance norm": (lambda m, a: F.instance_norm(m.conv(a)), [img]),
    "channels in front": (lambda m, a: m.conv(a).permute(1, 2, 0, 3).cos().permute(2, 0, 1, 3), [img]),
    "pad": (lambda m, a: F.pad(a @ m.w, (1, 2)), [x]),
    "lstm": (lambda m, a: m.lstm(a)[0], [seq]),
    "lstm state": (lambda m, a: m.lstm(a)[1][0].squeeze(0), [seq]),
    "lstm time first": (lambda m, a: m.lstm_time_first(a.transpose(0, 1))[0].transpose(0, 1), [seq]),
    "attention": (lambda m, a: m.attention(a, a, a, need_weights=False)[0], [seq]),
    "attention weights": (lambda m, a: m.attention(a, a, a), [seq]),
    "sdpa": (lambda m, a: F.scaled_dot_product_attention(a[:, None], a[:, None] @ m.w, a[:, None]), [seq]),
    "flattened and back": (lambda m, a: (a.reshape(-1, WIDTH) @ m.w).view(a.shape[0], TIME, WIDTH), [seq]),
    "heads": (lambda m, a: (a @ m.w).view(-1, TIME, 2, 3).transpose(1, 2).flatten(0, 1).view(-1, 2, TIME, 3), [seq]),
    "flattened output": (lambda m, a: (a @ m.w).flatten(0, 1), [seq]),
    "unbind and stack": (lambda m, a: torch.stack([t @ m.w for t in a.unbind(1)], 1), [seq]),
    "chunk": (lambda m, a: torch.cat([t * 2 for t in (a @ m.w).chunk(3, -1)], 1), [x]),
    "split": (lambda m, a: torch.mul(*(a @ m.w).split(3, 1)), [x]),
    "expand a token": (lambda m, a: torch.cat([m.b.expand(a.shape[0], 1, -1), a], 1) @ m.w, [seq]),
    "repeat a token": (lambda m, a: torch.cat([m.b.repeat(a.shape[0], 1, 1), a], 1) @ m.w, [seq]),
    "repeat within": (lambda m, a: a.repeat(1, 3).view(-1, 3, WIDTH) @ m.w, [x]),
    "expand within": (lambda m, a: a[:, None].expand(-1, 3, -1) @ m.w, [x]),
    "interleave within": (lambda m, a: (a @ m.w).repeat_interleave(2, 1), [x]),
    "einsum": (lambda m, a: torch.einsum("btd,de->bte", a, m.w), [seq]),
    "einsum of samples": (lambda m, a: torch.einsum("btd,bsd->bts", a, a @ m.w), [seq]),
    "einsum diagonal": (lambda m, a: torch.einsum("bii->bi", a[:, :, :TIME] @ m.w[:TIME, :TIME]), [seq]),
    "look up": (lambda m, i: m.table(i) @ m.w, [words]),
    "index a table": (lambda m, i: m.table.weight[i] @ m.w, [words]),
    "own position": (lambda m, a, i: (a @ m.w)[torch.arange(a.shape[0]), i], [x, labels]),
    "own positions": (lambda m, a, i: (a @ m.w)[torch.arange(a.shape[0])[:, None], i[:, :2] % 5], [seq, words]),
    "gather": (lambda m, a, i: (a @ m.w).gather(1, i[:, None]), [x, labels]),
    "scatter": (lambda m, a, i: torch.zeros_like(a).scatter(1, i[:, None], 1.0) * a @ m.w, [x, labels]),
    "one hot": (lambda m, i: F.one_hot(i, WIDTH).double() @ m.w, [labels]),
    "where": (lambda m, a: torch.where(a > 0, a @ m.w, m.b), [x]),
    "masked fill": (lambda m, a: (a @ m.w).masked_fill(a < 0, -1.0), [x]),
    "causal mask": (lambda m, a: (a @ a.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), -9.0).softmax(-1) @ a, [seq]),
    "tril": (lambda m, a: (a @ a.mT).tril() @ (a @ m.w), [seq]),
    "two inputs": (lambda m, a, c: a @ m.w * c, [x, column]),
    "per sample scale": (lambda m, a, c: a @ m.w * c[:, None], [x, scalars]),
    "slices assigned": (_assign, [x]),
    "in place": (lambda m, a: (a @ m.w).mul_(2.0).add_(m.b).relu_(), [x]),
    "counter": (_buffer, [x]),
    "no_grad": (_no_grad, [x]),
    "autocast": (_autocast, [x]),
    "eval batch norm": (lambda m, a: F.batch_norm(a @ m.w, m.running, m.running + 1), [x]),
    "input given back": (lambda m, a: (a, a @ m.w), [x]),
    "parameter given back": (lambda m, a: (a @ m.w, m.b), [x]),
    "twice": (lambda m, a: (lambda y: (y, y, {"z": [y, None, 3]}))(a @ m.w), [x]),
    "number": (lambda m, a: (a @ m.w, a.shape[0]), [x]),
    "from another dimension": (lambda m, a: (a @ m.w).t(), [x]),
    "squeezed": (lambda m, a: (a @ m.w)[:, :1].squeeze().cos(), [x]),
    "squeezed sequence": (lambda m, a: (a @ m.w)[..., :1].squeeze().softmax(-1).squeeze(0), [seq]),
    "squeezed in two dimensions": (lambda m, a: (a @ m.w)[..., None].squeeze((0, -1)).squeeze(1), [seq]),
    # losses
    "regression": (lambda m, a, c: F.mse_loss((a @ m.w)[:, :1].squeeze(), c.squeeze()), [x, column]),
    "mean": (lambda m, a: (a @ m.w).square().mean(), [x]),
    "sum": (lambda m, a: (a @ m.w).square().sum(), [x]),
    "mean and outputs": (lambda m, a: ((a @ m.w).square().mean(), a @ m.w), [x]),
    "mean by hand": (lambda m, a: (a @ m.w).square().sum() / a.shape[0], [x]),
    "mean by numel": (lambda m, a: (a @ m.w).square().sum() / a.numel(), [x]),
    "mean by float": (lambda m, a: (a @ m.w).square().sum() / float(a.shape[0]), [x]),
    "sum from mean": (lambda m, a: (a @ m.w).square().mean() * a.shape[0], [x]),
    "mean with regulariser": (lambda m, a: (a @ m.w).square().mean() + 0.1 * m.w.square().sum(), [x]),
    "sum with regulariser": (lambda m, a: (a @ m.w).square().sum() + 0.1 * m.w.square().sum(), [x]),
    "sum with constant": (lambda m, a: (a @ m.w).square().sum() + 3.0, [x]),
    "mean and sum": (lambda m, a: (a @ m.w).square().mean() + 0.1 * a.square().sum() - 2.0, [x]),
    "constant minus mean": (lambda m, a: 1.0 - (a @ m.w).square().mean(), [x]),
    "constant minus sum": (lambda m, a: m.b.sum() - (a @ m.w).square().sum() * 2, [x]),
    "stacked losses": (lambda m, a: torch.stack([(a @ m.w).mean(), a.square().mean()]).sum(), [x]),
    "vector of losses": (lambda m, a: ((a @ m.w).sum() * m.b).sum(), [x]),
    "mse": (lambda m, a, c: F.mse_loss((a @ m.w)[:, 0], c), [x, scalars]),
    "mse sum": (lambda m, a, c: F.mse_loss((a @ m.w)[:, 0], c, reduction="sum"), [x, scalars]),
    "mse none": (lambda m, a, c: F.mse_loss((a @ m.w)[:, 0], c, reduction="none"), [x, scalars]),
    "smooth l1": (lambda m, a, c: F.smooth_l1_loss(a @ m.b, c), [x, scalars]),
    "bce": (lambda m, a, c: F.binary_cross_entropy_with_logits(a @ m.b, c.sigmoid()), [x, scalars]),
    "kl": (lambda m, a: F.kl_div(F.log_softmax(a @ m.w, 1), a.softmax(1), reduction="batchmean"), [x]),
    "cross entropy": (lambda m, a, y: F.cross_entropy(a @ m.w, y), [x, labels]),
    "cross entropy sum": (lambda m, a, y: F.cross_entropy(a @ m.w, y, reduction="sum"), [x, labels]),
    "cross entropy none": (lambda m, a, y: F.cross_entropy(a @ m.w, y, reduction="none"), [x, labels]),
    "class weights, sum": (lambda m, a, y: F.cross_entropy(a @ m.w, y, m.running + 0.5, reduction="sum"), [x, labels]),
    "class weights, mean": (
        lambda m, a, y: F.cross_entropy(a @ m.w, y, m.running + CLASSES),
        [x, labels],
    ),
    "class weights, made": (lambda m, a, y: F.cross_entropy(a @ m.w, y, m.b.detach().exp()), [x, labels]),
    "class weights, nll": (
        lambda m, a, y: F.nll_loss(F.log_softmax(a @ m.w, 1), y, m.running + CLASSES),
        [x, labels],
    ),
    "class weights, padded": (
        lambda m, a, y: F.cross_entropy((a @ m.w).view(-1, WIDTH), y.view(-1), m.running + CLASSES),
        [seq, marks],
    ),
    "class weights, padded, smoothed, classes second": (
        lambda m, a, y: F.cross_entropy((a @ m.w).transpose(1, 2), y, m.running + CLASSES, label_smoothing=0.1),
        [seq, marks],
    ),
    "probabilities": (lambda m, a: F.cross_entropy(a @ m.w, a.detach().softmax(1)), [x]),
    "nll": (lambda m, a, y: F.nll_loss(F.log_softmax(a @ m.w, 1), y), [x, labels]),
    "padded": (lambda m, a, y: F.cross_entropy((a @ m.w).reshape(-1, WIDTH), y.reshape(-1)), [seq, marks]),
    "padded, smoothed": (
        lambda m, a, y: F.cross_entropy((a @ m.w).view(-1, WIDTH), y.view(-1), label_smoothing=0.1),
        [seq, marks],
    ),
    "padded, classes second": (lambda m, a, y: F.cross_entropy((a @ m.w).transpose(1, 2), y), [seq, marks]),
    "padded, sum": (
        lambda m, a, y: F.cross_entropy((a @ m.w).transpose(1, 2), y, reduction="sum"),
        [seq, marks],
    ),
    "padded, shifted": (
        lambda m, a, y: F.cross_entropy((a @ m.w)[:, :-1].reshape(-1, WIDTH), y[:, 1:].reshape(-1)),
        [seq, marks],
    ),
    "padded with regulariser": (
        lambda m, a, y: F.cross_entropy((a @ m.w).transpose(1, 2), y) * 2 + 0.1 * m.w.square().sum() + a.mean(),
        [seq, marks],
    ),
    "two padded losses": (
        lambda m, a, y, z: F.cross_entropy((a @ m.w).mT, y) - 0.5 * F.cross_entropy((a @ m.w.t()).mT, z),
        [seq, marks, marks],
    ),
    "masked mean by hand": (lambda m, a, k: ((a @ m.w).sum(-1) * k).sum() / k.sum(), [seq, mask]),
    "masked mean, clamped": (lambda m, a, k: ((a @ m.w).sum(-1) * k).sum() / k.sum().clamp(min=1), [seq, mask]),
    "masked mean of lengths": (
        lambda m, a, y: 0.5 * ((a @ m.w).sum(-1) * (y != -100)).sum() / ((y >= 0).sum(1).sqrt().sum() + 1e-6),
        [seq, marks],
    ),
    "masked mean with regulariser": (
        lambda m, a, k: ((a @ m.w).sum(-1) * k).sum() / k.sum() + 0.1 * m.w.square().sum() + a.square().sum(),
        [seq, mask],
    ),
    "two masked means": (
        lambda m, a, k: ((a @ m.b) * k).sum() / k.sum() + ((a @ m.w).sum(-1) * (1 - k)).sum() / (1 - k).sum(),
        [seq, mask],
    ),
    "correct ones": (lambda m, a, y: (F.cross_entropy(a @ m.w, y), ((a @ m.w).argmax(1) == y).sum()), [x, labels]),
    "hit rate": (lambda m, a, y: (a @ m.w, ((a @ m.w).argmax(1) == y).double().mean()), [x, labels]),
}
"""Samples do not depend on each other, and the analysis has to see it."""

COUPLED: dict[str, tuple[Forward, list[Callable[[], torch.Tensor]]]] = {
    "x @ x.T": (lambda m, a: a @ a.t() @ a @ m.w, [x]),
    "x.T @ x": (lambda m, a: a @ (a.t() @ a), [x]),
    "softmax over the batch": (lambda m, a: torch.softmax(a @ m.w, 0), [x]),
    "cumsum over the batch": (lambda m, a: torch.cumsum(a @ m.w, 0), [x]),
    "flip the batch": (lambda m, a: (a @ m.w).flip(0), [x]),
    "roll the batch": (lambda m, a: (a @ m.w).roll(1, 0), [x]),
    "roll everything": (lambda m, a: (a @ m.w).roll(1), [x]),
    "centred over the batch": (lambda m, a: a @ m.w - a.mean(0), [x]),
    "vector made of all": (lambda m, a: (a @ m.w).sum() * m.b, [x]),
    "sum over the batch": (lambda m, a: (a @ m.w).sum(0), [x]),
    "max over the batch": (lambda m, a: (a @ m.w).max(), [x]),
    "median of all": (lambda m, a: a @ m.w * a.median(), [x]),
    "sorted batch": (lambda m, a: torch.sort(a @ m.w, 0).values, [x]),
    "norm of all": (lambda m, a: (a @ m.w).norm(), [x]),
    "renorm": (lambda m, a: torch.renorm(a @ m.w, 2.0, 1, 1.0), [x]),
    "variance of all": (lambda m, a: (a @ m.w).var(), [x]),
    "quantile": (lambda m, a: torch.quantile(a @ m.w, 0.5, dim=0), [x]),
    "logsumexp of all": (lambda m, a: torch.logsumexp(a @ m.w, (0, 1)), [x]),
    "product of losses": (lambda m, a: (a @ m.w).sum() * a.sum(), [x]),
    "squared loss": (lambda m, a: (a @ m.w).mean() ** 2, [x]),
    "perplexity": (lambda m, a, y: F.cross_entropy(a @ m.w, y).exp(), [x, labels]),
    "loss of integers": (lambda m, a: (a @ m.w, a.sum().long()), [x]),
    "hits in bool": (lambda m, a: (a @ m.w, (a > 0).sum().bool()), [x]),
    "loss times samples": (lambda m, a: a * (a @ m.w).mean(), [x]),
    "masked mean of the model's mask": (
        lambda m, a: (lambda k: ((a @ m.w).sum(-1) * k).sum() / k.sum())((a @ m.b).sigmoid()),
        [seq],
    ),
    "count of labels as a factor": (lambda m, a, k: ((a @ m.w).sum(-1) * k).sum() * k.sum(), [seq, mask]),
    "count of labels for each": (lambda m, a, k: (a @ m.w).sum(-1) / k.sum(), [seq, mask]),
    "masked mean of means": (lambda m, a, k: ((a @ m.w).sum(-1) * k).mean() / k.mean(), [seq, mask]),
    "masked mean, rounded": (
        lambda m, a, k: torch.div(((a @ m.w).sum(-1) * k).sum(), k.sum(), rounding_mode="floor"),
        [seq, mask],
    ),
    "count of labels given back": (lambda m, a, k: ((a @ m.w).sum(), k.mean() ** 2), [seq, mask]),
    "normalised by the greatest": (lambda m, a, k: (a @ m.w) / k.max(), [x, scalars]),
    "labels of the model": (lambda m, a: F.cross_entropy(a @ m.w, (a @ m.w.t()).argmax(1)), [x]),
    "labels are positions": (
        lambda m, a: F.cross_entropy(a.repeat(1, 2) @ m.w.repeat(2, 1), torch.arange(len(a))),
        [x],
    ),
    "contrastive": (lambda m, a: F.cross_entropy(a @ (a @ m.w).t(), torch.arange(a.shape[0])), [x]),
    "mse of a column and a row": (lambda m, a, c, d: F.mse_loss(a[:, :1] @ m.w[:1, :1] + c, d), [x, column, scalars]),
    "column minus row": (lambda m, a, c, d: (c - d) @ torch.ones(a.shape[0]) + a @ m.b, [x, column, scalars]),
    "labels of other samples": (
        lambda m, a, y: F.cross_entropy((a @ m.w).reshape(-1, WIDTH), y.t().reshape(-1)),
        [seq, marks],
    ),
    "samples as classes": (lambda m, a: F.cross_entropy((a @ m.w).t(), torch.zeros(WIDTH, dtype=torch.long)), [x]),
    "mixed by a reshape": (lambda m, a: (a @ m.w).reshape(WIDTH, -1).t(), [x]),
    "mixed by a transposed reshape": (lambda m, a: (a @ m.w).t().reshape(-1, WIDTH), [x]),
    "every other sample": (lambda m, a: (a @ m.w)[::2], [x]),
    "first sample": (lambda m, a: a @ m.w - a[:1], [x]),
    "last sample": (lambda m, a: a @ m.w - a[-1], [x]),
    "shifted samples": (lambda m, a: torch.cat([a[1:], a[:1]]) @ m.w, [x]),
    "half of the batch": (lambda m, a: (a @ m.w)[: a.shape[0] // 2], [x]),
    "batch joined": (lambda m, a: torch.cat([a, a @ m.w]), [x]),
    "batch repeated": (lambda m, a: a.repeat(2, 1) @ m.w, [x]),
    "all pairs": (lambda m, a: (a[:, None] * a[None]).sum(-1) @ torch.ones(a.shape[0], 1), [x]),
    "expanded to the batch": (lambda m, a: a[:, None].expand(-1, a.shape[0], -1).sum(1) @ m.w, [x]),
    "distances": (lambda m, a: torch.cdist(a, a @ m.w).amin(1), [x]),
    "picked": (lambda m, a, i: (a @ m.w)[i % 3], [x, labels]),
    "shuffled": (lambda m, a, i: (a @ m.w)[i.argsort()], [x, labels]),
    "index select": (lambda m, a, i: (a @ m.w).index_select(0, i.clamp(max=2)), [x, labels]),
    "positions of samples": (lambda m, a: a + m.w[torch.arange(a.shape[0]) % WIDTH], [x]),
    "positions in a table": (lambda m, a: a + m.table.weight[torch.arange(a.shape[0])], [x]),
    "position encoding": (lambda m, a: a + m.table.weight[: a.shape[0]], [x]),
    "positions as numbers": (lambda m, a: a * torch.arange(a.shape[0])[:, None], [x]),
    "positions flattened": (
        lambda m, a: (a @ m.w).view(-1, WIDTH)[torch.arange(a.shape[0])[:, None].expand(-1, TIME).reshape(-1)],
        [seq],
    ),
    "size of the batch": (lambda m, a: a @ m.w / a.shape[0], [x]),
    "size as a number": (lambda m, a: a @ m.w + torch.full((WIDTH,), a.shape[0] * 1.0), [x]),
    "size as a float": (lambda m, a: a @ m.w * float(a.shape[0]), [x]),
    "quarter of the batch": (lambda m, a: (a @ m.w).sum() * (a.shape[0] // 4), [x]),
    "capped size": (lambda m, a: (a @ m.w).sum() / min(a.shape[0], 100_000), [x]),
    "ones of the batch": (lambda m, a: a @ m.w * torch.ones(a.shape[0] + 1).sum(), [x]),
    "mask of a batch": (lambda m, a: (a @ m.w)[a[:, 0] > 0].sum(), [x]),
    "masked select": (lambda m, a: (a @ m.w).masked_select(a > 0).mean(), [x]),
    "batch norm": (lambda m, a: m.batch_norm(a @ m.w), [x]),
    "running mean": (_running, [x]),
    "running number": (_running_scalar, [x]),
    "samples as channels": (lambda m, a: F.group_norm((a @ m.w)[None], 1), [x]),
    "samples as time": (lambda m, a: m.lstm(a[None])[0][0], [x]),
    "samples as sequence": (lambda m, a: m.lstm_time_first(a)[0], [seq]),
    "attention over samples": (lambda m, a: m.attention(a[None], a[None], a[None])[0][0], [x]),
    "sdpa over samples": (lambda m, a: F.scaled_dot_product_attention(a, a @ m.w, a), [x]),
    "layer norm over samples": (lambda m, a: (lambda y: F.layer_norm(y, y.shape[-1:]))((a @ m.w).t()).t(), [x]),
    "einsum over samples": (lambda m, a: torch.einsum("bd,be->de", a, a @ m.w), [x]),
    "einsum of pairs": (lambda m, a: torch.einsum("bd,cd->bc", a, a @ m.w) @ a, [x]),
    "einsum sum": (lambda m, a: torch.einsum("bd,de->e", a, m.w), [x]),
    "sample copied": (_first_sample, [x]),
    "dropped weights": (_weights_dropout, [x]),
    "noise for all": (lambda m, a: a @ m.w + torch.randn(WIDTH), [x]),
    "frequencies": (lambda m, i: F.embedding(i, m.table.weight, scale_grad_by_freq=True), [words]),
    "padded loss in autocast": (_masked_loss_in_autocast, [seq, marks]),
    "mixed losses in autocast": (_mixed_in_autocast, [x]),
    "padding the batch": (lambda m, a: F.pad(a @ m.w, (0, 0, 1, 0)), [x]),
    "one value written": (lambda m, a: (a @ m.w).index_put((torch.tensor([0]),), torch.zeros(())), [x]),
    "convolved over samples": (lambda m, a: F.conv1d((a @ m.w)[None, :1], m.w[:1, :1][None]), [x]),
    "rows of samples as image": (lambda m, a: F.avg_pool1d((a @ m.w).t()[None], 2, 1), [x]),
}
"""A sample's result depends on others (or on how many or which there are); pieces would be wrong."""

REFUSED = {
    "every other sample",
    "shifted samples",
    "mixed by a transposed reshape",
    "position encoding",
    "samples as time",
    "samples as sequence",
    "rows of samples as image",
}
"""Of the coupled ones: their graph would hold for one size of the batch only, so there is none."""
