"""torch.optim's optimizers, computed by RoundPipe's host kernels.

Given parameters, each class behaves as its namesake in `torch.optim`: arguments, param_groups, state, state_dict, hooks
and schedulers are torch's. fp32 and complex64 parameters on the host are updated in one pass over memory by all cores;
all other parameters go to torch. `Lion` is not in torch.

Given a RoundPipe model, each updates the model's layers in place while gradients arrive, see `RoundPipe.step`.
"""

from roundpipe.optim.adafactor import Adafactor
from roundpipe.optim.adagrad import Adadelta, Adagrad, RMSprop
from roundpipe.optim.adam import Adam, Adamax, AdamW, NAdam, RAdam
from roundpipe.optim.lion import Lion
from roundpipe.optim.muon import Muon
from roundpipe.optim.rprop import Rprop
from roundpipe.optim.sgd import ASGD, SGD
from roundpipe.optim.threads import set_threads

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "set_threads",
]
