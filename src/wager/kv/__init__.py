"""Where keys and values live: the accounting of blocks, and the moves of accepted tree paths between them."""
