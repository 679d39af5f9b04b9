"""Controllers: one file a policy of how much to speculate."""
