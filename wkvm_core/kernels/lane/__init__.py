"""What the tables of lanes hold: columns and bits, plain integers that samplers on every device share."""

from __future__ import annotations

# Columns of `numbers`, int64. The first four change with each sampled token.
NEXT, POSITION, REMAINING, STATUS, STOPS, HALTS, KEY, MIN_TOKENS, NEEDS, TOP_K = range(10)
NUM_NUMBERS = 10
# Columns of `knobs`, float64. SHARPNESS is 1 / temperature, 0 where the lane is greedy. EDGE is the scaled logit at
# which top-p cut last, 0 at first: where a search may look first, which changes no result.
SHARPNESS, TOP_P, TYPICAL_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, EDGE = range(8)
NUM_KNOBS = 8
# What happened to a row is a code: the marks of its token, these bits, and its lane's STATUS above them.
LAST, PAUSED, BROKEN = 16, 32, 64
# Values of STATUS.
ACTIVE, WAITING, DONE = 0, 128, 256
# Columns of `outcomes`, int64 [codes, 5]: what to or into the token, flags, what to add to POSITION, REMAINING, STATUS.
INTO_TOKEN, FLAGS, ADD_POSITION, ADD_REMAINING, ADD_STATUS = range(5)
NUM_OUTCOMES = 5
# Bits of NEEDS: what a lane asks of the sampler beyond the plain greedy path.
SAMPLED, RANKED, TYPICAL, FLOORED, COUNTED, BIASED, DELAYED, LOGPROBS = (1 << bit for bit in range(8))
# A count's high bit says that the id is in the prompt, the rest how often it was generated.
IN_PROMPT = 1 << 30
BAN = -100.0
# Columns of a table of rows, int64, and the bits of its ASKS.
READ, WRITE, LANE, TOKEN, ASKS = range(5)
NUM_ROW_COLUMNS = 5
FEED, SAMPLE, GO, PAUSE = 1, 2, 4, 8
LEFT_OVER = -2
"""Token of a row that the launch leaves to be sampled otherwise."""
