"""The tasksets of this distribution, published like anybody's through the entry-point group ``glm5.tasksets``."""
