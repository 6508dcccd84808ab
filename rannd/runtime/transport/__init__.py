"""Messages of bytes between ranks: one interface, and a body for each way they can go.

In: messages and buffers of bytes on this rank's device. Out: the same bytes in the peer's buffer. `transport.py` is the
interface and says what each body promises; `choice.py` selects one. Read them first; then `gloo_transport.py` (CPU),
`nccl_transport.py` (GPUs, one each), `staged_transport.py` (several ranks on one GPU), `strict_transport.py` (the rules
of NCCL on CPUs, for tests).
"""
