"""Who runs next, in which pages, how deep a round drafts, and which program runs."""
