"""What commands share: messages and tables, options, plots. The commands themselves are in `cli`, `planner` and
`simulation`."""
