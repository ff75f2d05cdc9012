"""Speed, as ratios against a peer or a bare baseline measured in the same run: `make bench`."""
