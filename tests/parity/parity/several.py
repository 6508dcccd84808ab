"""Cases with several stages per slot: interleaved 1F1B and ZB-V, with what the other cases are made of."""

from __future__ import annotations

from parity.case import Case
from rannd.plan.run_modes import Offload

INTERLEAVED, ZB_V = "interleaved_1f1b", "zb_v"
ASKED = (("RANNC_INTERLEAVE_LOSS", "false"),)
ACTIVATIONS = Offload(activations=True)
STATE, PARAMS, BOTH = Offload(optimizer=True), Offload(params=True), Offload(optimizer=True, params=True)

SEVERAL = [
    Case("mean", ranks=2, stages=4, passes=2, micro=2, schedule=INTERLEAVED),
    Case("mean", ranks=2, stages=4, passes=2, micro=2, schedule=ZB_V),
    Case("mean", ranks=1, stages=2, passes=2, micro=2, schedule=ZB_V, optimizer="adam"),
    Case("mean", ranks=2, stages=4, passes=2, micro=8, schedule=INTERLEAVED, rows=(3, 2), script="accumulate"),
    Case("sum", ranks=2, stages=4, passes=2, micro=4, schedule=ZB_V, rows=(8, 0), script="delay"),
    Case("sum", ranks=3, stages=6, passes=2, micro=2, schedule=INTERLEAVED, rows=(0, 8, 5), recompute=True),
    Case("tutorial", ranks=2, stages=8, passes=4, micro=2, schedule=INTERLEAVED, script="evaluate"),
    Case("tutorial", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=3, script="together"),
    Case("mean", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=0, rows=(8, 5, 3, 7)),
    Case("mean", ranks=4, stages=4, passes=2, micro=4, schedule=INTERLEAVED, zero=1, optimizer="adamw", recompute=True),
    Case("mean", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=2, script="accumulate"),
    Case(
        "mean", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=3, script="evalfirst", recompute=True
    ),
    Case("mean", ranks=4, stages=4, passes=2, micro=4, schedule=INTERLEAVED, zero=2, rows=(8, 0, 3, 1)),
    Case("mean", ranks=4, stages=4, passes=2, micro=2, schedule=ZB_V, zero=0, script="average"),
    Case("mean", ranks=4, stages=4, passes=2, micro=4, schedule=ZB_V, zero=1, optimizer="adam", rows=(8, 5, 3, 7)),
    Case("skip", ranks=2, stages=6, passes=3, micro=2, schedule=INTERLEAVED, optimizer="adam"),
    Case("skip", ranks=4, stages=8, passes=2, micro=2, schedule=ZB_V, rows=(8, 5, 3, 7)),
    Case("skip", ranks=2, stages=4, passes=2, micro=4, schedule=INTERLEAVED, script="probe", rows=(1, 2)),
    Case("tied", ranks=2, stages=4, passes=2, micro=2, schedule=ZB_V, script="evaluate"),
    Case("tied", ranks=2, stages=4, passes=2, micro=2, schedule=INTERLEAVED, optimizer="adamw"),
    Case("tied", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=3, optimizer="adamw"),
    Case("gpt2", ranks=2, stages=4, passes=2, micro=4, schedule=INTERLEAVED, optimizer="adam", script="delay"),
    Case("gpt2", ranks=2, stages=4, passes=2, micro=4, schedule=ZB_V, optimizer="adamw", rows=(4, 7)),
    Case("gpt2", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=2, optimizer="adam"),
    Case(
        "gpt2masked", ranks=4, stages=8, passes=2, micro=2, schedule=INTERLEAVED, optimizer="adamw", rows=(8, 5, 3, 7)
    ),
    Case("gpt2masked", ranks=4, stages=4, passes=2, micro=2, schedule=ZB_V, zero=1, script="allreduce"),
    Case("t5", ranks=2, stages=4, passes=2, micro=2, schedule=ZB_V, optimizer="adamw", rows=(4, 7), script="average"),
    Case("t5", ranks=2, stages=8, passes=4, micro=2, schedule=INTERLEAVED, script="evaluate", recompute=True),
    Case("convmean", ranks=2, stages=4, passes=2, micro=4, schedule=ZB_V, rows=(8, 5)),
    Case("convnorm", ranks=2, stages=4, passes=2, micro=1, schedule=INTERLEAVED),
    Case("convloss", ranks=2, stages=4, passes=2, micro=1, schedule=ZB_V, script="evaluate"),
    Case("nested", ranks=2, stages=4, passes=2, micro=2, schedule=INTERLEAVED, rows=(8, 5)),
    Case("auxiliary", ranks=2, stages=4, passes=2, micro=2, schedule=ZB_V),
    Case("counter", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=1, optimizer="groups"),
    Case("latereader", ranks=2, stages=4, passes=2, micro=2, schedule=INTERLEAVED, script="evaluate"),
    Case("frozen", ranks=2, stages=4, passes=2, micro=2, schedule=ZB_V),
    Case("finetuned", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=2),
    Case("inplace", ranks=2, stages=4, passes=2, micro=2, schedule=INTERLEAVED),
    Case("filled", ranks=2, stages=4, passes=2, micro=2, schedule=ZB_V, optimizer="adamw"),
    Case("unused", ranks=2, stages=4, passes=2, micro=2, schedule=INTERLEAVED, optimizer="adamw"),
    Case("masked", ranks=2, stages=4, passes=2, micro=4, schedule=ZB_V, rows=(3, 1)),
    Case("regularised", ranks=2, stages=4, passes=2, micro=2, schedule=ZB_V, script="accumulate"),
    Case("mean", ranks=2, stages=4, passes=2, micro=2, schedule=INTERLEAVED, env=ASKED, script="together"),
    Case("mean", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=3, env=ASKED),
    Case("skip", ranks=2, stages=4, passes=2, micro=4, schedule=ZB_V, env=ASKED, optimizer="adagrad"),
    Case("mean", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=1, offload=STATE, optimizer="adam"),
    Case("tied", ranks=2, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=3, offload=PARAMS, optimizer="adam"),
    Case("gpt2", ranks=2, stages=4, passes=2, micro=4, schedule=ZB_V, offload=ACTIVATIONS, optimizer="adam"),
    Case("skip", ranks=2, stages=4, passes=2, micro=2, schedule=INTERLEAVED, offload=ACTIVATIONS, script="accumulate"),
    Case("skip", ranks=2, stages=4, passes=2, micro=4, schedule=INTERLEAVED, zero=3, offload=BOTH, script="accumulate"),
    Case("mean", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=3, offload=BOTH, optimizer="adamw"),
    Case("gpt2", ranks=4, stages=4, passes=2, micro=2, schedule=INTERLEAVED, zero=3, offload=PARAMS, script="evaluate"),
]
"""All of them."""
SOME_OF_SEVERAL = SEVERAL[::3]
"""Those of `make test` and `make test-long`."""
