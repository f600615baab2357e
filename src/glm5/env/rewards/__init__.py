"""Rewards of tasks whose answers are not simply right or wrong: rules, a reward model, a judge, blended per taskset."""
