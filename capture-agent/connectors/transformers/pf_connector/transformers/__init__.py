"""The connector for loops over Hugging Face transformers.

    attachment = Attachment(model, engine="hf-0")
    sequence = attachment.open("chat-1", prompt)
    while not done:
        with attachment.step():
            logits = sequence.forward(model)
            sequence.append(int(logits.argmax()))
    ...
    sequence = attachment.restored.get()      # a restored sequence, ready for its next step

Caches of transformers are tensors that grow. Between two steps, and only when the agent asks, the
connector copies what is new of a sequence's cache into pages of an arena in shared memory; a
restored sequence's cache is built from the arena.
"""

from pf_connector.identity import Unidentified

from .attachment import Attachment, Sequence
from .cache import Unsupported

__all__ = ["Attachment", "Sequence", "Unidentified", "Unsupported"]
