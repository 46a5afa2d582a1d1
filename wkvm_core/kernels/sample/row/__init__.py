"""Passes over one row of logits: its best id, and its shape after penalties, bias and bans."""
