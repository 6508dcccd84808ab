"""Rules of operators that treat samples independently: layers, pooling, resizing, linear algebra, FFT."""

from __future__ import annotations

from torch.fx import Node

from rannd.graph.rows.rules.operation import Operation, away, dims_of, everywhere, leaves, rule, together
from rannd.graph.rows.rules.states import FIXED, Coupled, Rows, State


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(op: Operation) -> State:
    """Input of shape (samples, channels, spatial ...)."""
    op.fixed("weight", "bias")
    rows = op.rows("input")
    ndim = len(op.shape(op.args["input"]))
    if rows is None or rows.dim != 0 or ndim != len(op.shape(op.args["weight"])):
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows


@rule("group_norm", "channel_shuffle", "native_channel_shuffle")
def channels(op: Operation) -> State:
    """Input of shape (samples, channels, ...); works on groups of channels."""
    op.fixed("weight", "bias")
    rows = op.rows("input" if "input" in op.args else "self")
    if rows is None or rows.dim != 0:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def layer_norm(op: Operation) -> State:
    op.fixed("weight", "bias")
    ndim = len(op.shape(op.args["input"]))
    rows = away(op, "input", set(range(ndim - len(op.args["normalized_shape"]), ndim)))
    return everywhere(op, rows)


@rule("batch_norm")
def batch_norm(op: Operation) -> State:
    if op.args["training"]:
        raise Coupled("batch_norm normalises over the batch")
    op.fixed("weight", "bias", "running_mean", "running_var")
    return away(op, "input", {1})


@rule("instance_norm")
def instance_norm(op: Operation) -> State:
    if isinstance(op.args.get("running_mean"), Node) and op.args["use_input_stats"]:
        raise Coupled("instance_norm keeps statistics over the batch")
    op.fixed("weight", "bias", "running_mean", "running_var")
    return away(op, "input", set(range(1, len(op.out))))


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(op: Operation) -> State:
    """Returns (output, states ...); states have shape (layers, batch, width)."""
    if "batch_first" not in op.args:
        raise Coupled(f"{op.name} of packed sequences is not supported")
    rows = op.rows("input")
    first = 0 if op.args["batch_first"] else 1
    if rows is None or rows.dim != first or len(op.shape(op.args["input"])) != 3:
        raise Coupled(f"{op.name} does not have the samples where it expects the batch")
    op.fixed("params")
    for state in leaves(op.args["hx"]):
        found = op.as_rows(state)
        if found is not None and (found.dim, found.outer, found.inner) != (1, rows.outer, rows.inner):
            raise Coupled(f"{op.name} has a hidden state of other samples")
    return (rows, *(Rows(1, rows.outer, rows.inner),) * (len(op.node.meta["val"]) - 1))


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent_cell(op: Operation) -> State:
    """One time step: input and state have shape (samples, width)."""
    op.fixed("w_ih", "w_hh", "b_ih", "b_hh")
    rows = op.rows("input")
    if rows is None or rows.dim != 0 or any(op.as_rows(state) != rows for state in leaves(op.args["hx"])):
        raise Coupled(f"{op.name} combines different samples")
    return everywhere(op, rows)


@rule("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
def fused_attention(op: Operation) -> State:
    """Inputs of shape (samples, time, width); the mask is shared, (time, time), or has the samples in dimension 0."""
    tensors = ("src",) if "src" in op.args else ("query", "key", "value")
    op.fixed(*(name for name in op.args if name not in (*tensors, "mask")))
    rows, mask = together(op, *tensors), op.args.get("mask")
    if rows != Rows(0, 1, 1) or len(op.shape(op.args[tensors[0]])) != 3:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    if mask is not None and op.state(mask) is not FIXED and op.rows("mask") != rows:
        raise Coupled(f"{op.name} combines different samples")
    return everywhere(op, rows)


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices",
      "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
      "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool1d",
      "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
      "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
      "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
      "upsample_trilinear3d")  # fmt: skip
def planes(op: Operation) -> State:
    """Works on the last 1, 2 or 3 dimensions (the digit in the operator's name); the others are batch dimensions."""
    name = "input" if "input" in op.args else "self"
    ndim = len(op.shape(op.args[name]))
    last = next(int(letter) for letter in op.name if letter.isdigit())
    return everywhere(op, away(op, name, set(range(ndim - last, ndim))))


@rule("max_unpool2d", "max_unpool3d", "fractional_max_pool2d", "fractional_max_pool3d")
def pairs_of_planes(op: Operation) -> State:
    """Works on the spatial dimensions of two tensors: the input, and indices or random numbers per sample."""
    spatial = next(int(letter) for letter in op.name if letter.isdigit())
    rows = together(op, "self", "indices", "random_samples")
    if rows.dim != 0 or len(op.shape(op.args["self"])) != spatial + 2:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return everywhere(op, rows)


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(op: Operation) -> State:
    """Works on the last three dimensions of (..., channels, height, width)."""
    ndim = len(op.out)
    return away(op, "self", {ndim - 3, ndim - 2, ndim - 1})


@rule("im2col", "col2im")
def windows(op: Operation) -> State:
    """(samples, channels, height, width) to or from (samples, channels x window elements, windows)."""
    rows = op.rows("self")
    batched = 4 if op.name == "im2col" else 3
    if rows is None or rows.dim != 0 or len(op.shape(op.args["self"])) != batched:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(op: Operation) -> State:
    """Input and grid both have the samples in dimension 0."""
    rows = together(op, "input", "grid")
    if rows.dim != 0:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows


@rule("affine_grid_generator")
def affine_grid(op: Operation) -> State:
    """One grid per matrix in `theta`."""
    return away(op, "theta", {1, 2})


@rule("inverse", "linalg_inv", "linalg_inv_ex", "det", "linalg_det", "slogdet", "linalg_slogdet", "logdet", "pinverse",
      "cholesky", "linalg_cholesky", "linalg_cholesky_ex", "cholesky_solve", "cholesky_inverse", "qr", "linalg_qr",
      "svd", "linalg_svd", "linalg_svdvals", "linalg_eig", "linalg_eigvals", "linalg_eigh", "linalg_eigvalsh",
      "linalg_pinv", "linalg_lu", "linalg_lu_factor", "linalg_solve", "linalg_solve_triangular", "triangular_solve",
      "linalg_matrix_power", "matrix_power", "matrix_exp", "linalg_matrix_exp", "linalg_matrix_rank",
      "linalg_lstsq")  # fmt: skip
def matrices(op: Operation) -> State:
    """Works on the last two dimensions; the batch dimensions of all tensors must be alike."""
    tensors = [value for value in op.args.values() if isinstance(value, Node)]
    states = {op.as_rows(tensor) for tensor in tensors}
    ndims = {len(op.shape(tensor)) for tensor in tensors}
    if len(states) != 1 or len(ndims) != 1:
        raise Coupled(f"{op.name} combines different samples")
    (rows,), (ndim,) = states, ndims
    if rows is None or rows.dim >= ndim - 2:
        raise Coupled(f"{op.name} works along the batch dimension")
    return everywhere(op, rows)


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2", "fft_rfft2",
      "fft_irfft2", "fft_hfft2", "fft_ihfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn",
      "fft_ihfftn", "fft_fftshift", "fft_ifftshift")  # fmt: skip
def fourier(op: Operation) -> State:
    """Works along the dimensions `dim`."""
    return away(op, "self", dims_of(op.args["dim"], len(op.shape(op.args["self"]))))


@rule("stft", "istft")
def short_time_fourier(op: Operation) -> State:
    """(samples, time) to (samples, frequency, time), or back."""
    op.fixed("window")
    rows = op.rows("self")
    batched = 2 if op.name == "stft" else 3
    if rows is None or rows.dim != 0 or len(op.shape(op.args["self"])) != batched:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows
