"""A model as a frontend knows it: card, tokenizer, template, and how it stops."""

from __future__ import annotations

from wkvm_frontend.chat.open import open_stop_defaults, open_template
from wkvm_frontend.chat.template import Template, is_prefix_stable
from wkvm_frontend.text.open import open_tokenizer
from wkvm_frontend.text.tokenizer import Tokenizer
from wkvm_frontend.text.world import WorldTokenizer
from wkvm_proto.messages import MAX_STOP_TEXT_BYTES, ModelCard, Vocabulary
from wkvm_proto.vocabulary import vocabulary_digest, vocabulary_message


class ServedModel:
    """All that turns a model's text into ids and back; immutable."""

    def __init__(self, card: ModelCard) -> None:
        """Reads the model's folder. Raises BadTokenizer, BadTemplate."""
        self.card = card
        self.tokenizer: Tokenizer = open_tokenizer(card)
        self.template: Template = open_template(card, self.tokenizer)
        self.vocabulary: Vocabulary = vocabulary_message(self.tokenizer.table)
        self.digest: bytes = vocabulary_digest(self.vocabulary)
        stops = open_stop_defaults(card.directory)
        # The World vocabulary ends with id 0; configs converted for other tools name ids that mean something else.
        extra = () if isinstance(self.tokenizer, WorldTokenizer) else stops.ids
        self.eos_ids: tuple[int, ...] = tuple(
            sorted({token for token in (*card.eos_ids, *extra) if 0 <= token < card.vocab_size})
        )
        texts = dict.fromkeys((*self.template.stop_texts, *stops.texts))
        self.chat_stops: tuple[str, ...] = tuple(
            text for text in texts if 0 < len(text.encode()) <= MAX_STOP_TEXT_BYTES
        )
        self.prefix_stable: bool = is_prefix_stable(self.template, self.tokenizer)
