"""The engine core: owns the slots, the step loop and the store. Speaks token ids only."""

from wkvm_proto import __version__ as __version__
