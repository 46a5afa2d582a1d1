"""Conversations: messages to prompt segments, and generated text to thoughts and answers."""
