"""What is learned from a tenant's traffic, on disk: `files` are its logs and segments, `learning` writes and reads them
while an engine runs, `kept` what is learned of them."""
