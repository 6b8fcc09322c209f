"""The parts of :class:`engines.rollout.vllm_engine.VLLMEngine`.

gate            which requests may begin, and what a pause means for them (pure)
request         one request: what vLLM is asked, what its outputs mean
first_act       what vLLM's processes do first: end with their parent, keep files where they are cleared away
starting        from a model folder to a running AsyncLLM
checkpoint      the names and shapes that an update must have
meter           what vLLM says of its scheduler
confirmation    how the ranks say that they hold the next version
worker          what runs inside vLLM's workers: fetching, verifying and loading weights
"""
