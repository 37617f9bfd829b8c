"""The decoding core: one loop, the interfaces it calls, verification, trees and probabilities."""
