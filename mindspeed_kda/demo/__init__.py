"""A small byte-level language model of KDA layers: what ``demo`` trains and ``verify`` takes its inputs from."""
