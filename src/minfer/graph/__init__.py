"""The declarative graph and its pipeline: build, assign, fuse, allocate, cache."""

from minfer.graph.ir import Graph, GraphParams, Node, Placement, Weight
from minfer.graph.plan import Plan

__all__ = ["Graph", "GraphParams", "Node", "Placement", "Plan", "Weight"]
