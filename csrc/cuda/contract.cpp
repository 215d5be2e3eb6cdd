#include "contract/contract.inl"
#include "contract/shapes.inl"
