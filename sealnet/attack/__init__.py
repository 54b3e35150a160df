"""The escape kit: every door of a seal is tried from inside, against other ends that were seen to be there."""
