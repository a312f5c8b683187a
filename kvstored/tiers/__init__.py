"""Places where objects live, behind one small ABC. Imports io, never store."""
