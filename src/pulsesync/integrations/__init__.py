"""Where the protocol meets what other people's programs read and write: one module for each."""
