"""The published package's path to the losses of causal language models; see `roundpipe.ops.causal_lm_loss`."""

from roundpipe.ops.causal_lm_loss import TOKEN_CHUNK_SIZE as TOKEN_CHUNK_SIZE
from roundpipe.ops.causal_lm_loss import ChunkedCompileLinearForCausalLMLoss as ChunkedCompileLinearForCausalLMLoss
from roundpipe.ops.causal_lm_loss import CompileCrossEntropy as CompileCrossEntropy
from roundpipe.ops.causal_lm_loss import CompileForCausalLMLoss as CompileForCausalLMLoss
from roundpipe.ops.causal_lm_loss import CompileLinearCrossEntropy as CompileLinearCrossEntropy
