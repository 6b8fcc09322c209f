"""Parts of the embedded engine: continuous batching over a transformers model inside this process.

row             one request while the engine holds it
schedule        who joins, who leaves, who sits where (pure)
stop_text       stop strings over a growing token sequence
sampling        one token per row, with its log-prob
slot_cache      keys and values of the running rows
decoder         the model's forward over rows
shadow_weights  the next version, beside the one that serves
generation      one step: all of the above together
stepping        who calls the step: a thread, or the event loop
"""
