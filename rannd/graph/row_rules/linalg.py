"""Linear algebra on stacks of matrices, and Fourier transforms."""

from __future__ import annotations

from torch.fx import Node

from rannd.graph.row_rules.operation import Operation, away, dims_of, everywhere, rule
from rannd.graph.row_states import Coupled, State


@rule("inverse", "linalg_inv", "linalg_inv_ex", "det", "linalg_det", "slogdet", "linalg_slogdet", "logdet", "pinverse",
      "cholesky", "linalg_cholesky", "linalg_cholesky_ex", "cholesky_solve", "cholesky_inverse", "qr", "linalg_qr",
      "svd", "linalg_svd", "linalg_svdvals", "linalg_eig", "linalg_eigvals", "linalg_eigh", "linalg_eigvalsh",
      "linalg_pinv", "linalg_lu", "linalg_lu_factor", "linalg_solve", "linalg_solve_triangular", "triangular_solve",
      "linalg_matrix_power", "matrix_power", "matrix_exp", "linalg_matrix_exp", "linalg_matrix_rank",
      "linalg_lstsq")  # fmt: skip
def matrices(op: Operation) -> State:
    """Works on the last two dimensions of each tensor; what is in front of them is alike in all of them."""
    tensors = [value for value in op.args.values() if isinstance(value, Node)]
    states = {op.as_rows(tensor) for tensor in tensors}
    ndims = {len(op.shape(tensor)) for tensor in tensors}
    if len(states) != 1 or len(ndims) != 1:
        raise Coupled(f"{op.name} combines different samples")
    (rows,), (ndim,) = states, ndims
    if rows is None or rows.dim >= ndim - 2:
        raise Coupled(f"{op.name} works across the samples")
    return everywhere(op, rows)


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2", "fft_rfft2",
      "fft_irfft2", "fft_hfft2", "fft_ihfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn",
      "fft_ihfftn", "fft_fftshift", "fft_ifftshift")  # fmt: skip
def fourier(op: Operation) -> State:
    """Works along its dimensions."""
    return away(op, "self", dims_of(op.args["dim"], len(op.shape(op.args["self"]))))


@rule("stft", "istft")
def short_time_fourier(op: Operation) -> State:
    """(samples, time) to (samples, frequency, time), and back."""
    op.fixed("window")
    rows = op.rows("self")
    batched = 2 if op.name == "stft" else 3
    if rows is None or rows.dim != 0 or len(op.shape(op.args["self"])) != batched:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows
