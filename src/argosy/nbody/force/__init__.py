"""Compute the force on every particle: a mesh for long ranges, a tree for short ones.

The order of computation is ``hilbert``, ``tree``, ``tasks``, ``pairs``, beside ``mesh``. This
package may import the particles. Start reading at ``split``, then ``gravity``.
"""
